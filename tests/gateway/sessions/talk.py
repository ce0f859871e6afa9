"""Conversations for tests: requests of a scripted application, routes without a network behind them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from adapters.dialects import ChatDialect, CompletionsDialect
from gateway.config.route import RouteSettings
from gateway.sessions.conversation import DeliveredTurn
from gateway.sessions.open_groups import OpenGroups
from gateway.sessions.sessions import SessionLink, Sessions
from gateway.types import Caller, Incoming
from reward_hooks import HookContext, HookRunner, Hooks, Session
from swarm.job import ServingMode, TrainJob
from swarm.states import EngineState
from swarm.status import EngineStatus, ServerStatus

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def token_ids(prompt: list[int]) -> Incoming:
    call = CompletionsDialect().parse({"model": "tiny", "prompt": prompt})
    return Incoming(call, {}, Caller("app"), "/v1/completions", b"", "r")


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


class StatusOfNobody:
    """A swarm server that says once how it is, and then what the test says."""

    def __init__(self, groups: int = 8) -> None:
        self.state = EngineState.ROLLING
        self.job = TrainJob(model="tiny", num_repeat=2, batch_size=groups)
        self.serving: ServingMode = "between_steps"
        self.syncs = 0
        self._observers: list[Callable[[ServerStatus], Awaitable[None]]] = []
        self.watched = 0

    def _status(self) -> ServerStatus:
        engine = EngineStatus(engine_status=self.state)
        return ServerStatus(engine=engine, job=self.job, serving=self.serving, weight_syncs=self.syncs)

    @property
    def engine(self) -> StatusOfNobody:
        return self

    async def watch(self, on_status: Callable[[ServerStatus], Awaitable[None]]) -> None:
        self.watched += 1
        self._observers.append(on_status)
        try:
            await on_status(self._status())
            await asyncio.Event().wait()
        finally:
            self._observers.remove(on_status)

    async def enter(self, state: EngineState) -> None:
        self.state = state
        self.syncs += state is EngineState.WEIGHT_SYNCING
        for observer in list(self._observers):
            await observer(self._status())


def no_reward(task: Any, candidates: Any, context: HookContext) -> list[float]:
    raise AssertionError("a session scores no group")


class Ended:
    """A session hook that notes whom it was asked about, and gives each turn its number."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def __call__(self, session: Session, context: HookContext) -> list[float]:
        self.sessions.append(session)
        return [float(number + 1) for number, _ in enumerate(session.turns)]


def no_groups() -> OpenGroups:
    """Of a swarm server without a network."""
    nobody: Any = StatusOfNobody()
    return OpenGroups(nobody)


@dataclass
class Talks:
    """The part of a route that sessions use."""

    name: str
    settings: RouteSettings
    hooks: HookRunner
    open_groups: OpenGroups = field(default_factory=no_groups)


def route(
    on_session_end: Callable[[Session, HookContext], list[float]] | None = None, name: str = "route", **settings: Any
) -> Talks:
    return Talks(
        name=name,
        settings=RouteSettings(hooks="length", **settings),
        hooks=HookRunner(Hooks(reward=no_reward, session_end=on_session_end)),
    )


def incoming(messages: Messages, key: str = "app", headers: dict[str, str] | None = None, **body: Any) -> Incoming:
    data = {"model": "tiny", "messages": messages, **body}
    return Incoming(
        call=ChatDialect().parse(data),
        headers=headers or {},
        caller=Caller(key),
        path="/v1/chat/completions",
        raw=json.dumps(data).encode(),
        request_id="r",
    )


_NUMBERS = itertools.count()


def ask(sessions: Sessions, to: Talks, messages: Messages, **request: Any) -> SessionLink:
    return sessions.link(incoming(messages, **request), to.name, to.settings, to.hooks)


def say(
    sessions: Sessions,
    to: Talks,
    messages: Messages,
    answer: str,
    reward: float | None = 0.5,
    completion_id: str = "",
    **request: Any,
) -> SessionLink:
    """One request and its answer; the messages grow by both."""
    link = ask(sessions, to, messages, **request)
    message = assistant(answer)
    link.delivered(completion_id or f"chatcmpl-{next(_NUMBERS)}", message, reward)
    messages.append(message)
    return link


async def closed(link: SessionLink, groups: OpenGroups | None = None) -> DeliveredTurn:
    """The answer once its group is to be submitted."""
    assert link.turn is not None
    return await link.turn.closing(no_groups() if groups is None else groups)


def texts(link: SessionLink) -> list[str]:
    """The answers of the turns that hooks are shown."""
    return [turn.message["content"] for turn in link.session.turns] if link.session is not None else []
