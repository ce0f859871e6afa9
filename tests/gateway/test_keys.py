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
    assert ring.accepts("right") and ring.accepts("another")
    assert not ring.accepts("wrong") and not ring.accepts("") and not ring.accepts(DIGEST)


def test_a_ring_without_keys_is_open() -> None:
    assert KeyRing([]).accepts("") and KeyRing([]).accepts("anything")


def test_the_ring_holds_no_key_in_clear() -> None:
    assert "hush" not in repr(vars(KeyRing([SecretStr("hush")])))
