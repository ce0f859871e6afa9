"""What of a request's head goes beyond the edge: nothing secret, and all by which the stages know a request."""

from __future__ import annotations

import pytest

from gateway.api.endpoint import caller_of, public_headers
from gateway.types import Caller


@pytest.mark.parametrize(
    "name", ["idempotency-key", "x-swarm-session", "x-swarm-policy", "x-stainless-retry-count", "user-agent", "x-app"]
)
def test_what_the_stages_and_hooks_need_is_let_through(name: str) -> None:
    assert public_headers([(name.encode(), b"value")]) == {name: "value"}


@pytest.mark.parametrize(
    "name",
    [
        *("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie", "x-auth-request-email"),
        *("x-session-id", "x-amz-security-token", "x-csrf-token", "x-password", "openai-credential"),
        *("x-idempotency-key", "idempotency-key-secret"),
    ],
)
def test_what_may_tell_of_a_secret_is_not(name: str) -> None:
    assert public_headers([(name.encode(), b"value"), (b"accept", b"*/*")]) == {"accept": "*/*"}


def test_bytes_that_are_no_ascii_and_names_that_come_twice() -> None:
    assert public_headers([(b"x-name", b"one"), (b"x-name", b"J\xf6rg")]) == {"x-name": "Jörg"}


def test_an_open_gateway_knows_nobody() -> None:
    assert caller_of({"type": "http", "state": {}}) == Caller()
    assert caller_of({"type": "http", "state": {"caller": Caller("k")}}).key_id == "k"
