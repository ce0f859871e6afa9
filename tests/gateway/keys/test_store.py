"""The file of keys: what is in it, and what it refuses. What every file of credentials does is tested in
:mod:`tests.swarm.credentials`."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.keys.store import KeyFile
from swarm.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "folder" / "keys.json")


def test_a_key_is_told_once_and_kept_as_a_digest(file: KeyFile) -> None:
    key, text = file.create("app", routes=["b", "a", "b"], requests_per_minute=5, lifetime=timedelta(days=1))
    [kept] = file.read()
    assert kept == key and (kept.routes, kept.requests_per_minute) == (["a", "b"], 5)
    secret = text.removeprefix(f"sk-swarm-{key.id}-")
    assert len(secret) == 32 and secret not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_an_absent_file_holds_no_keys(file: KeyFile) -> None:
    assert file.read() == [] and file.last_used() == {}


def test_a_label_belongs_to_one_active_key(file: KeyFile) -> None:
    first, _ = file.create("app")
    with pytest.raises(ConfigError, match="already"):
        file.create("app")
    file.revoke("app")
    second, _ = file.create("app")
    assert file.revoke("app").id == second.id != first.id


def test_an_unknown_key_is_named_with_those_there_are(file: KeyFile) -> None:
    file.create("app")
    with pytest.raises(ConfigError, match=r"no key 'apx'.*app"):
        file.revoke("apx")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": ""}, "label"),
        ({"label": "a", "requests_per_minute": 0}, "requests_per_minute"),
        ({"label": "a", "lifetime": timedelta(days=999_999_999)}, "calendar"),
    ],
)
def test_wrong_values_are_one_line_and_write_nothing(file: KeyFile, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        file.create(**settings)  # type: ignore[arg-type]
    assert file.read() == []
