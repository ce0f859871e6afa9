"""The trainer's feed: what it hands to verl's loggers, and how it serves on after the last step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.link.messages import BatchReady, Message, RolloutReady, Stop
from swarm.types import EvalResult
from tests.swarm.server.journal.build import batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("verl") is None, reason="needs the cpu extra"),
]

EVALUATED = EvalResult(step=4, episodes=6, metrics={"eval/reward_mean": 0.5})


class Link:
    """The rollout's end, with what the server says."""

    lost = False

    def __init__(self, *messages: Message) -> None:
        self.sent: list[Message] = []
        self._messages = list(messages)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, timeout: float) -> Message | None:
        return self._messages.pop(0)


@contextmanager
def no_watch(addresses: list[str]) -> Iterator[Any]:
    yield SimpleNamespace(death="")


def test_it_serves_on_until_it_is_stopped_and_logs_what_was_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        # verl imports what Ray has moved
        warnings.simplefilter("ignore")
        from adapters.verl import feed as module

    monkeypatch.setattr(module, "HealthWatch", no_watch)
    stray = BatchReady(batch=batch("late", t=["e"]))
    link = Link(stray, Stop(evaluations=[EVALUATED]))
    feed = module.BatchFeed(link, "tiny", "between_steps", SimpleNamespace(free_cache_engine=False))  # type: ignore[arg-type]
    logged: list[tuple[int, Mapping[str, float]]] = []
    replicas: Any = SimpleNamespace(addresses=["127.0.0.1:1"], policy_version=lambda: 4)
    feed.attach(replicas, lambda metrics, step: logged.append((step, metrics)))
    with pytest.raises(module.StopRequested):
        feed.serve_on(5)
    [asked] = link.sent
    assert isinstance(asked, RolloutReady) and (asked.policy_version, asked.next_step) == (4, 5)
    assert logged == [(4, {"eval/reward_mean": 0.5, "eval/episodes": 6.0})]


def test_a_step_has_its_time_limit_before_its_rows_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        # verl imports what Ray has moved
        warnings.simplefilter("ignore")
        from adapters.verl import feed as module

    done: list[str] = []

    class Queue:
        def __getattr__(self, name: str) -> Any:
            return lambda **_: done.append(name)

    monkeypatch.setattr(module, "HealthWatch", no_watch)
    monkeypatch.setattr(module, "tq", Queue())
    link = Link(BatchReady(batch=batch("b", t=["e"])))
    feed = module.BatchFeed(link, "tiny", "between_steps", SimpleNamespace(free_cache_engine=False))  # type: ignore[arg-type]
    replicas: Any = SimpleNamespace(addresses=["127.0.0.1:1"], policy_version=lambda: 0)
    feed.attach(replicas, lambda metrics, step: None, lambda: done.append("arrived"))
    assert feed.collect() == 1
    assert done == ["arrived", "kv_batch_put", "kv_put"]
