"""The conversations of a gateway: requests are linked to earlier answers, and the session's reward as a whole is
credited to the answers whose groups are still open.

Invariant: a session ends exactly once (idle, by the endpoint, evicted, or at shutdown); its hook is asked at
most once, and each of its rewards reaches the turn's group before its submission or is counted as dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from adapters.dialects import DIALECTS
from gateway.config.route import RouteSettings
from gateway.observability.request import deleted, note, notes
from gateway.sessions.conversation import (
    Conversation,
    DeliveredTurn,
    GroupWatcher,
    Scope,
    SessionReport,
    heard,
    names_of,
)
from gateway.sessions.credit import Crediting
from gateway.sessions.memory import Digests, Memory, Position, answered, digests_of, sharing
from gateway.sessions.signals import observe
from gateway.stats import SessionCounts, hook_failed
from gateway.types import Incoming
from reward_hooks import Feedback, HookRunner, Session
from swarm.concurrency import Background, Latest
from swarm.errors import HookError
from swarm.subjects import Subject, session_names

logger = logging.getLogger(__name__)

EndedBy = Literal["idle", "endpoint", "evicted", "shutdown"]

#: Answers to lists of prompts, the latest, whose parts are known; a list may have a hundred of them.
_MOST_LISTS = 2000
#: Grace of session hooks at shutdown.
_LAST_SECONDS = 10.0


class Sessions:
    """One per gateway, for all routes; an async context that ends all sessions. ``watcher`` is shown the groups of
    requests that are linked here."""

    def __init__(self, *, max_sessions: int = 10_000, max_bytes: int = 64 * 1024**2) -> None:
        self._ending = Background(grace_seconds=_LAST_SECONDS)
        self._memory = Memory(max_sessions, max_bytes)
        self._crediting = Crediting()
        #: by key, session and route; those of sessions that are over, too: their groups are decided afterwards
        self._reports = Latest[tuple[str, str, str], SessionReport](max_sessions)
        #: by key and by name: the names of the parts, and how many choices each part has
        self._lists = Latest[tuple[str, str], tuple[Sequence[str], int]](_MOST_LISTS)
        self.counts = SessionCounts()
        self.watcher: GroupWatcher | None = None

    def link(self, incoming: Incoming, route: str, settings: RouteSettings, hooks: HookRunner) -> SessionLink:
        """The position of a request in its conversation; raises as :func:`names_of`."""
        scope, agent, digests, position = self._located(incoming, route)
        if position is not None:
            self.counts.linked[position.linked_by] += 1
            self.counts.signals.update(observe(position, digests.digest, incoming.call.messages))
        name = scope.session or (position.conversation.session_id if position is not None else "")
        # of a conversation that begins without a name, until it has one
        if name:
            note(session=name)
        report = self._report(scope, name) if name else SessionReport(route)
        agent = position.agent if position is not None else agent
        link = SessionLink(self, incoming, settings, hooks, scope, agent, digests, position, report, name)
        self._begin(link)
        return link

    @contextmanager
    def held(self, link: SessionLink) -> Generator[None]:
        """Inside, the request is under way again: another answer stands in for its own."""
        self._begin(link)
        try:
            yield
        finally:
            self.gave_up(link)

    def gave_up(self, link: SessionLink) -> None:
        """The request is under way no more, and has no answer that is remembered."""
        if link.position is not None:
            link.position.conversation.under_way.pop(link, None)
            self._goes_on(link.position.conversation)

    def count_untrained(self, incoming: Incoming, route: str, reason: str) -> None:
        """Count a request of a named session that got an untrained answer, by why; the session, also one that has no
        name, goes on."""
        scope, agent, _, position = self._located(incoming, route)
        conversation = position.conversation if position is not None else self._memory.named.get(scope)
        if conversation is not None:
            self._goes_on(conversation)
        if scope.session:
            self._report(scope, scope.name).ledger(agent).passed[reason] += 1

    def remember(
        self,
        link: SessionLink,
        completion_id: str,
        message: dict[str, Any],
        reward: float | None,
        choices: int,
        *,
        trains: bool,
    ) -> DeliveredTurn:
        """Keep a delivered answer; see :meth:`SessionLink.delivered`."""
        position, settings = link.position, link.settings
        if position is not None and not position.conversation.over:
            conversation, parent = position.conversation, position.parent
            conversation.under_way.pop(link, None)
        else:
            conversation = self._memory.named.get(link.scope) or self._begun(link, plain_id(completion_id))
            parent = None
        conversation.settings, conversation.hooks = settings, link.hooks
        link.name = conversation.session_id
        note(session=link.name)
        digest, inner, answer_size = answered(link.digests, message)
        body, size = sharing(link.incoming.call.body, link.digests.sizes, parent)
        turn = DeliveredTurn(
            completion_id=plain_id(completion_id),
            key_id=link.scope.key_id,
            body=body,
            message=message,
            reward=reward,
            asked=link.digests.digest,
            answered=digest,
            parent=parent,
            inner=inner,
            agent=link.agent,
            choices=choices,
            size=size + answer_size,
            notes=notes(),
            rules=settings.data.rules,
        )
        if trains:
            session_window = settings.session_window_seconds if link.hooks.ends_sessions else 0.0
            turn.waits(settings.feedback_window_seconds, session_window)
        for leaving in self._memory.add(conversation, turn):
            self._end(leaving, "evicted")
        self._goes_on(conversation)
        return turn

    def turn(self, completion_id: str, key_id: str) -> DeliveredTurn | None:
        """The answer with that id, in whatever dialect, if it was this key's."""
        turn = self._memory.by_id.get(plain_id(completion_id))
        return turn if turn is not None and turn.key_id == key_id else None

    def listed(self, key_id: str, name: str, parts: Sequence[str], choices: int) -> None:
        """What this key knows as ``name``, an answer or a request, is one of ``parts``, each with so many choices."""
        self._lists[key_id, plain_id(name)] = parts, choices

    def part(self, key_id: str, name: str, choice: int) -> tuple[str, int]:
        """The part of ``name`` that has the ``choice``, and the choice in it; both as they are if it has no parts."""
        parts, choices = self._lists.get((key_id, plain_id(name)), ((), 1))
        number, own = divmod(choice, choices)
        return (parts[number], own) if number < len(parts) else (name, choice)

    def end(self, session_id: str, key_id: str, feedback: Feedback | None = None, task: str = "") -> int:
        """End a key's session on all routes; returns how many there were. ``task`` names what it worked on, by default
        the request that it began with."""
        mine = [
            conversation
            for conversation in self._memory
            if conversation.scope.key_id == key_id and conversation.session_id in session_names(session_id)
        ]
        for conversation in mine:
            if feedback is not None:
                conversation.feedback = heard(feedback, conversation.settings.data.rules)
            conversation.task = task
            self._end(conversation, "endpoint")
        return len(mine)

    def erase(self, subject: Subject) -> int:
        """Forget the conversations that ``subject`` has a part in, without asking their hooks; how many there were."""
        erased = [conversation for conversation in self._memory if conversation.is_of(subject)]
        for conversation in erased:
            conversation.over = True
            if conversation.ending is not None:
                conversation.ending.cancel()
            self._memory.forget(self._memory.remove(conversation))
            _release(conversation)
        return len(erased)

    def reports(self, session_id: str, key_id: str) -> list[SessionReport]:
        """What became of the tokens of a key's session ``session_id``, for each of its routes."""
        names = session_names(session_id)
        return [report for key, report in self._reports.items() if key[0] == key_id and key[1] in names]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        for conversation in self._memory:
            self._end(conversation, "shutdown")
        await self._ending.__aexit__(*exc)

    def status(self) -> SessionCounts:
        """What is open now, and the counts."""
        return self.counts.model_copy(update={"open": len(self._memory), "bytes": self._memory.size})

    def _located(self, incoming: Incoming, route: str) -> tuple[Scope, str, Digests, Position | None]:
        """See :func:`names_of`; a sub-agent's session is that of the session which began it."""
        scope, agent, child = names_of(incoming, route)
        if child:
            scope = self._memory.adopt(scope, child)
        messages = incoming.call.messages
        digests = digests_of(messages)
        # a prompt of token ids says nothing about where it stands
        return scope, agent, digests, self._memory.locate(scope, agent, digests, messages) if messages else None

    def _begun(self, link: SessionLink, answer: str) -> Conversation:
        """A new session for the first answer of ``link``, which is its name unless it has one."""
        scope, report = link.scope, link.report
        name = scope.session or answer
        self._report(scope, name, report)
        report.ended = ""
        return Conversation(scope, name, link.settings, link.hooks, report)

    def _report(self, scope: Scope, name: str, new: SessionReport | None = None) -> SessionReport:
        key = scope.key_id, name, scope.route
        self._reports[key] = report = self._reports.get(key) or new or SessionReport(scope.route)
        return report

    def _begin(self, link: SessionLink) -> None:
        """A session with a request under way does not idle."""
        if link.position is not None:
            until = asyncio.get_running_loop().time() + link.settings.sample_timeout_seconds
            link.position.conversation.under_way[link] = until
            self._goes_on(link.position.conversation)

    def _goes_on(self, conversation: Conversation) -> None:
        if conversation.over:
            return
        self._memory.touch(conversation)
        loop = asyncio.get_running_loop()
        now, under_way = loop.time(), conversation.under_way
        for link in [link for link, until in under_way.items() if until <= now]:
            del under_way[link]
        if conversation.ending is not None:
            conversation.ending.cancel()
        seconds = idle_seconds(conversation.settings, credits=conversation.hooks.ends_sessions)
        silent = max(under_way.values(), default=now)
        conversation.ending = loop.call_at(silent + seconds, self._end, conversation, "idle")

    def _end(self, conversation: Conversation, by: EndedBy) -> None:
        if conversation.over:
            return
        conversation.over = True
        conversation.report.ended = by
        if conversation.ending is not None:
            conversation.ending.cancel()
        self.counts.ended[by] += 1
        if late := self._memory.remove(conversation):
            seconds = conversation.settings.feedback_window_seconds
            asyncio.get_running_loop().call_later(seconds, self._memory.forget, late)
        if conversation.hooks.ends_sessions and conversation.turns:
            self._ending.start(self._credit(conversation), f"ending session {conversation.session_id}")
        else:
            _release(conversation)

    async def _credit(self, conversation: Conversation) -> None:
        """Ask the hook for the session's rewards, and give them to the turns whose groups are open."""
        turns = [turn for turn in conversation.turns if not turn.retried]
        try:
            for turn, credit in zip(turns, await self._crediting.credits(conversation, turns), strict=True):
                if reaches := bool(credit) and turn.open:
                    turn.credit = credit
                for counts in (self.counts, conversation.report):
                    counts.credited += reaches
                    counts.credit_dropped += bool(credit) and not reaches
        except HookError as exc:
            logger.debug("session %s earns nothing: %s", conversation.session_id, exc)
            hook_failed(exc, self.counts)
        finally:
            _release(conversation)


@dataclass(eq=False)
class SessionLink:
    """One request's position in its conversation, from its arrival to the submission of its group.

    A return policy calls :meth:`delivered` when the answer is decided or has been streamed. Nothing is remembered of a
    request that was not answered.

    Attributes:
        name: of the session; empty where a conversation without a name has no answer yet.
        ledger: of the agent that asks.
        session: the turns before this one, for ``Candidate.session``; ``None`` where a conversation begins.
        turn: the delivered answer, once it is remembered.
    """

    sessions: Sessions
    incoming: Incoming
    settings: RouteSettings
    hooks: HookRunner
    scope: Scope
    agent: str
    digests: Digests
    position: Position | None
    report: SessionReport
    name: str
    turn: DeliveredTurn | None = None
    _left: bool = False

    def __post_init__(self) -> None:
        self.ledger = self.report.ledger(self.agent)
        self.ledger.requests += 1
        self.session: Session | None = None
        if (position := self.position) is not None:
            earlier = position.parent.path() if position.parent is not None else []
            self.session = position.conversation.session(earlier)

    def delivered(
        self,
        completion_id: str,
        message: dict[str, Any],
        reward: float | None,
        *,
        choices: int = 1,
        trains: bool = True,
    ) -> None:
        """This message is the answer (the best of ``choices``); call it once, before the last of it goes out. One that
        may not be kept, or whose conversation was deleted meanwhile, is not remembered. ``reward``: ``None`` where it
        has none (yet); ``trains``: whether its group may be trained."""
        if self.incoming.consent.withholds(message) or deleted():
            self.gave_up()
            return
        self.turn = self.sessions.remember(self, completion_id, message, reward, choices, trains=trains)
        if self._left:
            self.abandoned()

    def gave_up(self) -> None:
        """There is no answer that is remembered."""
        self.sessions.gave_up(self)

    def abandoned(self) -> None:
        """The user hung up on the answer, or before it was there."""
        self._left = True
        if self.turn is not None:
            self.turn.observe("abandoned", 1.0)
            self.sessions.counts.signals["abandoned"] += 1


def idle_seconds(settings: RouteSettings, *, credits: bool) -> float:
    """When a silent conversation is over; ``credits``: a hook is then asked what its open groups earned."""
    seconds = settings.session_idle_seconds
    if credits:
        return 300.0 if seconds is None else seconds
    # feedback to an answer whose group is open must find its conversation
    return max(1800.0 if seconds is None else seconds, settings.feedback_window_seconds)


def plain_id(completion_id: str) -> str:
    """A completion's id without its dialect's prefix."""
    prefixes = (dialect.id_prefix for dialect in DIALECTS if completion_id.startswith(dialect.id_prefix))
    return completion_id.removeprefix(next(prefixes, ""))


def _release(conversation: Conversation) -> None:
    for turn in conversation.turns:
        turn.session_over()
