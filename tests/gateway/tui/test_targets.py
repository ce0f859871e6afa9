"""From options to servers."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.tui.targets import Kind, make_targets
from swarm.errors import ConfigError


def test_addresses_as_people_write_them() -> None:
    one, two = make_targets(["127.0.0.1:10086"], "t", ["a:1"], None)
    assert (one.kind, one.url_of("/status"), one.secret) == (Kind.SWARM, "http://127.0.0.1:10086/status", "t")
    assert (two.kind, two.url_of("/status"), two.secret) == (Kind.GATEWAY, "http://a:1/status", "")
    assert make_targets([], "t", [], "k") == []
    [target] = make_targets(["https://me:secret@host:1/swarm/"], None, [], None)
    assert target.url_of("/status") == "https://me:secret@host:1/swarm/status"
    assert (target.address, target.name) == ("https://host:1/swarm", "host:1/swarm")


def test_one_secret_for_all_and_every_server_once() -> None:
    assert [target.secret for target in make_targets(["a", "b", "a"], "one\n", [], None)] == ["one", "one"]
    assert "one" not in repr(make_targets(["a"], "one", [], None))


def test_a_secret_of_the_environment_gives_way_to_one_in_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TOKEN", "of-another")
    own, plain = make_targets(["http://x:own@a:1", "b:1"], "of-another", [], None)
    assert (own.url_of("/status"), own.secret) == ("http://x:own@a:1/status", "")
    assert (plain.url_of("/status"), plain.secret) == ("http://b:1/status", "of-another")
    [named] = make_targets(["http://x:own@a:1"], "named", [], None)
    assert (named.url_of("/status"), named.secret) == ("http://a:1/status", "named")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["ftp://x"], None, [], None), "--swarm-url 'ftp://x' is no http address"),
        (
            ([], None, ["http://"], None),
            "--gateway-url 'http://' is no http address; write it like http://127.0.0.1:8000",
        ),
        (([], None, ["a"], "sch\u00f6n"), "--api-key (or SWARM_GATEWAY_KEY) has characters that no secret"),
    ],
)
def test_what_cannot_be(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_targets(*arguments)
    assert message in refused.value.message
    assert "sch" not in refused.value.message
