"""``tokens.json``: what is in it, who may read it, and what a damaged one says."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm.credentials import TokenFile, append_private
from swarm.errors import ConfigError


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "run")


def test_only_the_digest_is_kept(tokens: TokenFile) -> None:
    token = tokens.create("ci", ["read", "claim", "read"], timedelta(days=30))
    text = tokens.path.read_text()
    assert token not in text and token.removeprefix("swt_") not in text
    [stored] = json.loads(text)["tokens"]
    assert stored["sha256"] == hashlib.sha256(token.encode()).hexdigest()
    assert stored["scopes"] == ["claim", "read"]
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    assert len(token.removeprefix("swt_")) == 43, "256 bits in base64"
    assert tokens.create("other", ["admin"]) != token


def test_states(tokens: TokenFile) -> None:
    tokens.create("ci", ["claim"], timedelta(days=30))
    [token] = tokens.read()
    now = datetime.now(UTC)
    assert (token.state(now), token.state(now + timedelta(days=31))) == ("active", "expired")
    revoked = tokens.revoke("ci")
    assert revoked.state(now) == "revoked"
    assert tokens.revoke("ci") == revoked, "revoking again changes nothing"


def test_a_name_is_free_again_once_its_token_is_dead(tokens: TokenFile) -> None:
    first = tokens.create("ci", ["claim"])
    with pytest.raises(ConfigError, match="there is a token 'ci' already"):
        tokens.create("ci", ["claim"])
    tokens.revoke("ci")
    assert tokens.create("ci", ["claim"]) != first
    assert len(tokens.read()) == 1


def test_of_a_thousand_dead_ones_the_oldest_is_forgotten(tokens: TokenFile) -> None:
    tokens.create("ci", ["claim"], timedelta(hours=1))
    [first] = json.loads(tokens.path.read_text())["tokens"]
    names = [f"ci-{number:04}" for number in range(1002)]
    dead = {"expires": "2026-01-01T00:00:00.123456Z"}
    # as a script leaves them that makes one for each of its jobs; the first of them is never to end
    contents = [
        {**first, "name": name, "sha256": f"{number:064x}", **(dead if number else {"expires": None})}
        for number, name in enumerate(names)
    ]
    tokens.path.write_text(json.dumps({"version": 1, "tokens": contents}))
    tokens.create("ci-9999", ["claim"], timedelta(hours=1))
    assert [token.name for token in tokens.read()] == [names[0], *names[2:], "ci-9999"]


@pytest.mark.parametrize("name", ["", "-x", "a b", "a\n", "../x", "x" * 65, "nämé"])
def test_names_that_are_not_allowed(tokens: TokenFile, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        tokens.create(name, ["claim"])
    assert not tokens.path.exists()


def test_what_a_token_cannot_be(tokens: TokenFile) -> None:
    with pytest.raises(ConfigError, match="scopes"):
        tokens.create("x", [])
    with pytest.raises(ConfigError, match="scopes"):
        tokens.create("x", ["root"])
    with pytest.raises(ConfigError, match="calendar"):
        tokens.create("x", ["read"], timedelta(days=999_999_999))
    with pytest.raises(ConfigError, match=r"no token 'x' .*; there are: none"):
        tokens.revoke("x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Invalid JSON"),
        ('{"version": 2, "tokens": []}', "version"),
        ('{"tokens": [{"name": "x"}]}', "sha256"),
        (
            '{"tokens": [{"name": "x", "sha256": "12", "scopes": ["read"], "created": "2026-01-01T00:00:00Z"}]}',
            "sha256",
        ),
        ('{"tokenz": []}', "tokenz"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tokens: TokenFile, text: str, said: str) -> None:
    tokens.path.parent.mkdir()
    tokens.path.write_text(text)
    tokens.path.chmod(0o600)
    with pytest.raises(ConfigError, match=said) as caught:
        tokens.read()
    assert str(tokens.path) in caught.value.message
    with pytest.raises(ConfigError):
        tokens.create("new", ["read"])
    assert tokens.path.read_text() == text, "what cannot be read is not overwritten"


def test_two_tokens_of_one_name_are_damage(tokens: TokenFile) -> None:
    tokens.create("x", ["read"])
    data = json.loads(tokens.path.read_text())
    tokens.path.write_text(json.dumps({"tokens": data["tokens"] * 2}))
    with pytest.raises(ConfigError, match="two tokens have one name"):
        tokens.read()


def test_a_file_that_others_may_write_is_refused(tokens: TokenFile) -> None:
    tokens.create("x", ["read"])
    tokens.path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        tokens.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for others")
def test_what_root_writes_stays_readable_for_the_server_whose_folder_it_is(tokens: TokenFile) -> None:
    """As `sudo swarm-gateway swarm tokens revoke`: the server could not read its tokens from then on."""
    tokens.path.parent.mkdir()
    os.chown(tokens.path.parent, 1234, 1235)
    for change in (lambda: tokens.create("x", ["read"]), lambda: tokens.revoke("x")):
        change()
        owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in tokens.path.parent.iterdir()}
        assert owners == {"tokens.json": (1234, 1235), "tokens.json.lock": (1234, 1235)}
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for others")
def test_a_file_of_lines_that_root_begins_is_the_servers_whose_folder_it_is(tmp_path: Path) -> None:
    """As `sudo swarm-gateway swarm export`: the server could not read what was exported, and deleted nothing."""
    os.chown(tmp_path, 1234, 1235)
    for name, owner in (("begun.jsonl", (1234, 1235)), ("another.jsonl", (1236, 1237))):
        path = tmp_path / name
        if name == "another.jsonl":
            path.write_text("{}\n")
            os.chown(path, *owner)
        append_private(path, {"n": 1})
        append_private(path, {"n": 2})
        assert (path.stat().st_uid, path.stat().st_gid) == owner


def test_writers_do_not_lose_each_others_tokens(tokens: TokenFile) -> None:
    names = [f"t{n}" for n in range(16)]
    threads = [threading.Thread(target=tokens.create, args=(name, ["read"])) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(token.name for token in tokens.read()) == sorted(names)
    assert sorted(path.name for path in tokens.path.parent.iterdir()) == ["tokens.json", "tokens.json.lock"]


def test_a_line_that_a_full_disk_cut_off_harms_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "lines.jsonl", os.write
    append_private(path, {"n": 1})
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr("os.write", lambda file, data: write(file, data[:5]))
        append_private(path, {"n": 2})
    append_private(path, {"n": 3})
    assert path.read_text().splitlines() == ['{"n": 1}', '{"n":', '{"n": 3}']
