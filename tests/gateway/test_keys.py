"""API keys: in clear or as digests, and an open ring."""

from __future__ import annotations

import hashlib

import pytest
from pydantic import SecretStr

from gateway.keys import KeyRing

DIGEST = hashlib.sha256(b"right").hexdigest()


@pytest.mark.parametrize("held", ["right", f"sha256:{DIGEST}", f"sha256:{DIGEST.upper()}"])
def test_a_key_is_accepted_by_its_digest(held: str) -> None:
    ring = KeyRing([SecretStr("another"), SecretStr(held)])
    assert ring.accepts(b"right") and ring.accepts(b"another")
    assert not ring.accepts(b"wrong") and not ring.accepts(b"") and not ring.accepts(DIGEST.encode())


def test_a_key_beyond_ascii_is_compared_by_its_utf_8() -> None:
    ring = KeyRing([SecretStr("schlüssel")])
    assert ring.accepts("schlüssel".encode()) and not ring.accepts("schlüssel".encode("latin-1"))


def test_a_ring_without_keys_is_open() -> None:
    assert KeyRing([]).accepts(b"") and KeyRing([]).accepts(b"anything")


def test_the_ring_holds_no_key_in_clear() -> None:
    assert "hush" not in repr(vars(KeyRing([SecretStr("hush")])))
