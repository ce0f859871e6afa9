"""Whose a key is: keys of the configuration, virtual keys, and an open ring."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import logging
import os
import resource
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from gateway.config.gateway import GatewayConfig
from gateway.data.consent import Refusals
from gateway.keys.ring import KeyRing
from gateway.keys.store import KeyFile
from swarm.credentials import Ring, digest
from swarm.errors import AuthenticationError, ConfigError

pytestmark = pytest.mark.anyio

DIGEST = hashlib.sha256(b"right").hexdigest()


def ring(**settings: Any) -> KeyRing:
    return KeyRing(GatewayConfig(**{"hooks": "h", **settings}))


def accepts(keys: KeyRing, key: bytes) -> bool:
    try:
        keys.holder(digest(key))
    except AuthenticationError:
        return False
    return True


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "folder" / "keys.json")


@pytest.mark.parametrize("held", ["right", "right\n", f"sha256:{DIGEST}", f"sha256:{DIGEST.upper()}"])
def test_a_key_is_accepted_by_its_digest(held: str) -> None:
    keys = ring(api_keys=["another", held])
    assert accepts(keys, b"right") and accepts(keys, b"another") and not keys.open
    assert not accepts(keys, b"wrong") and not accepts(keys, b"") and not accepts(keys, DIGEST.encode())


def test_applications_are_told_apart_by_their_keys_of_the_configuration() -> None:
    keys = ring(api_keys=["one", "two"])
    one, two = keys.holder(digest(b"one")), keys.holder(digest(b"two"))
    assert one.caller.key_id and one.caller.key_id != two.caller.key_id
    assert not one.admin and one.caller.routes is None


def test_a_key_beyond_ascii_is_compared_by_its_utf_8() -> None:
    keys = ring(api_keys=["schlüssel"])
    assert accepts(keys, "schlüssel".encode()) and not accepts(keys, "schlüssel".encode("latin-1"))


def test_a_ring_without_keys_is_open_to_everyone_as_the_operator() -> None:
    keys = ring()
    assert keys.open and keys.holder(digest(b"")).admin and keys.holder(digest(b"anything")).admin


def test_a_virtual_key_says_what_it_opens_and_is_kept_as_a_digest(file: KeyFile) -> None:
    assert file.read() == [] and file.last_used() == {}
    key, text = file.create("app", routes=["b", "a", "b"], max_in_flight=3, requests_per_minute=5, admin=True)
    [kept] = file.read()
    assert kept == key and (kept.routes, kept.requests_per_minute) == (["a", "b"], 5)
    secret = text.removeprefix(f"sk-swarm-{key.id}-")
    assert len(secret) == 32 and secret not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    keys = ring(keys_file=file.path, api_keys=["hush"])
    assert text not in repr(vars(keys)) and "hush" not in repr(vars(keys))
    holder = keys.holder(digest(text))
    assert (holder.caller.key_id, holder.caller.routes) == (key.id, frozenset({"a", "b"}))
    assert (holder.caller.max_in_flight, holder.caller.label, holder.admin) == (3, "app", True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": ""}, "label"),
        ({"label": "a", "requests_per_minute": 0}, "requests_per_minute"),
        ({"label": "a", "lifetime": timedelta(days=999_999_999)}, "calendar"),
    ],
)
def test_wrong_values_are_one_line_and_write_nothing(file: KeyFile, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        file.create(**settings)
    assert file.read() == []


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + "x", lambda text: text.swapcase()])
def test_a_key_that_differs_opens_nothing(file: KeyFile, change: Any) -> None:
    _, text = file.create("app")
    keys = ring(keys_file=file.path)
    assert accepts(keys, text.encode()) and not accepts(keys, change(text).encode())


def test_expired_and_revoked_keys_say_so(file: KeyFile) -> None:
    _, expired = file.create("old", lifetime=timedelta(microseconds=1))
    key, revoked = file.create("gone")
    file.revoke(key.id)
    keys = ring(keys_file=file.path)
    for text, code in ((expired, "api_key_expired"), (revoked, "api_key_revoked")):
        with pytest.raises(AuthenticationError) as caught:
            keys.holder(digest(text))
        assert caught.value.code == code


def test_a_file_of_keys_is_never_an_open_ring(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        keys = ring(keys_file=file.path)
    assert not keys.open and not accepts(keys, b"") and "keys create" in caplog.text


def test_a_damaged_file_stops_the_start(file: KeyFile) -> None:
    file.path.parent.mkdir()
    file.path.write_text("{")
    file.path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        ring(keys_file=file.path)


async def test_made_and_revoked_keys_are_taken_over(file: KeyFile) -> None:
    keys = ring(keys_file=file.path)
    key, text = file.create("app")
    await keys.look()
    assert accepts(keys, text.encode())
    file.revoke("app")
    await keys.look()
    assert not accepts(keys, text.encode())
    assert key.state(datetime.now(UTC)) == "active"


@pytest.mark.parametrize("harm", [lambda path: path.write_text("no json"), lambda path: path.unlink()])
async def test_a_file_that_breaks_or_is_gone_is_logged_once_and_changes_nothing(
    file: KeyFile, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    _, text = file.create("app")
    keys = ring(keys_file=file.path)
    harm(file.path)
    await keys.look()
    await keys.look()
    assert accepts(keys, text.encode())
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_files_that_could_not_be_read_once_are_read_at_the_next_look(
    file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    """As while connections have taken all that a process may open, or a network file system lost its handle."""
    _, text = file.create("app")
    keys, refusals = Ring(file), Refusals(file.refusals_path)
    file.revoke("app")
    await Refusals(file.refusals_path).add("other", "")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        for _ in range(2):
            keys.refresh()
            await refusals.refresh()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2, "each is told once"
    keys.refresh()
    await refusals.refresh()
    found = keys.find(digest(text))
    assert found is not None and found.revoked is not None and refusals.refuses("other")


async def test_uses_are_noted_beside_the_file(file: KeyFile) -> None:
    used, text = file.create("used")
    file.create("unused")
    keys = ring(keys_file=file.path)
    before = datetime.now(UTC)
    async with keys.following():
        keys.holder(digest(text))
    assert set(file.last_used()) == {used.id} and file.last_used()[used.id] >= before
    earlier = before - timedelta(days=1)
    file.note_used({used.id: earlier, "0123456789ab": earlier})
    assert file.last_used()[used.id] >= before
    # of keys that are gone, whose number nothing bounds, nothing is kept
    assert set(file.last_used()) == {used.id}
    # but for the moment in which who brings back an older file has moved this one
    aside = file.path.rename(file.path.with_name("aside"))
    file.note_used({used.id: earlier})
    aside.rename(file.path)
    assert file.last_used()[used.id] >= before


async def test_a_disk_without_locks_stops_nobody_from_hearing_that_a_key_is_revoked(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems are: when keys were last used cannot be written there."""
    monkeypatch.setattr("gateway.keys.ring.POLL_SECONDS", 0.01)
    monkeypatch.setattr("gateway.keys.ring._LOOKS_PER_NOTE", 1)
    locked, refused = fcntl.flock, asyncio.Event()
    loop = asyncio.get_running_loop()

    def flock(lock: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{lock}").endswith(".used.lock"):
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        locked(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    key, text = file.create("app")
    keys = ring(keys_file=str(file.path))
    assert accepts(keys, text.encode())
    async with asyncio.timeout(20), keys.following():
        await refused.wait()
        file.revoke(key.id)
        while accepts(keys, text.encode()):
            await anyio.lowlevel.checkpoint()


async def test_a_system_without_another_thread_stops_nobody_from_hearing_that_a_key_is_revoked(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.keys.ring.POLL_SECONDS", 0.01)
    refused = asyncio.Event()

    async def no_thread(*_: Any) -> None:
        refused.set()
        raise RuntimeError("can't start new thread")

    key, text = file.create("app")
    keys = ring(keys_file=str(file.path))
    async with asyncio.timeout(20), keys.following():
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", no_thread)
            await refused.wait()
        file.revoke(key.id)
        while accepts(keys, text.encode()):
            await anyio.lowlevel.checkpoint()
