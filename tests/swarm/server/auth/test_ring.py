"""The tokens of a running server follow their file; whatever happens to it, no door opens or locks by accident."""

from __future__ import annotations

import hmac
import logging
from datetime import timedelta
from pathlib import Path

import pytest

from swarm.credentials import TokenFile
from swarm.errors import AuthenticationError, ConfigError
from swarm.server.auth import TokenRing


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path)


def test_an_expired_token(tokens: TokenFile, tmp_path: Path) -> None:
    token = tokens.create("ci", ["claim"], timedelta(seconds=-1)).encode()
    ring = TokenRing(None, tmp_path)
    with pytest.raises(AuthenticationError, match="expired"):
        ring.authenticate(token)
    assert not ring.usable()


@pytest.mark.parametrize("harm", ["garbage", "gone", "writable", "folder"])
def test_harm_to_the_file_keeps_the_tokens_and_is_logged_once(
    tokens: TokenFile, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = tokens.create("ci", ["claim"]).encode()
    ring = TokenRing(None, tmp_path)
    if harm == "garbage":
        tokens.path.write_text("{")
    elif harm == "writable":
        tokens.path.chmod(0o666)
    else:
        tokens.path.unlink()
        if harm == "folder":
            tokens.path.mkdir()
    for _ in range(3):
        assert ring.authenticate(token).name == "ci"
        assert not ring.empty
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "stay in force" in caplog.text
    if harm == "folder":
        tokens.path.rmdir()
    tokens.path.unlink(missing_ok=True)
    tokens.create("new", ["claim"])
    with pytest.raises(AuthenticationError):
        ring.authenticate(token)


def test_a_server_does_not_start_with_a_damaged_file(tokens: TokenFile, tmp_path: Path) -> None:
    tokens.path.write_text("{")
    with pytest.raises(ConfigError):
        TokenRing("s3cret", tmp_path)


def test_every_digest_is_compared_in_constant_time(
    tokens: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokens.create("first", ["read"]).encode()
    tokens.create("second", ["read"])
    ring = TokenRing("configured", tmp_path)
    compared: list[object] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key, expected in ((first, 3), (b"unknown", 3), (b"configured", 3)):
        compared.clear()
        try:
            ring.authenticate(key)
        except AuthenticationError:
            assert key == b"unknown"
        assert len(compared) == expected


def test_a_private_token_opens_everything_and_closes_nothing(tokens: TokenFile, tmp_path: Path) -> None:
    ring = TokenRing(None, tmp_path, private="between-us")
    assert ring.empty and not ring.usable()
    assert ring.authenticate(b"between-us").scopes == {"admin"}
    with pytest.raises(AuthenticationError):
        ring.authenticate(b"between-them")
