"""The conversations of a gateway: requests are linked to earlier answers, and what a session as a whole earns is
credited to the answers whose groups are still open.

Invariant: a session ends exactly once (idle, by header, by the endpoint, evicted, or at shutdown); its hook is asked at
most once, and what that hook says reaches each turn's group before its submission or is counted as dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import TracebackType
from typing import Any, Literal, Self

from gateway.background import Background
from gateway.sessions.conversation import Conversation
from gateway.sessions.digest import answered, size_of, spoken
from gateway.sessions.link import SessionLink
from gateway.sessions.memory import Memory
from gateway.sessions.naming import ends, scope_of
from gateway.sessions.ports import Route
from gateway.sessions.signals import observe
from gateway.sessions.turns import DeliveredTurn
from gateway.stats import Kinds
from gateway.types import Incoming
from reward_hooks import Feedback, HookContext
from swarm.errors import HookError

logger = logging.getLogger(__name__)

EndedBy = Literal["idle", "header", "endpoint", "evicted", "shutdown"]

#: What the hooks of all sessions get at shutdown.
_LAST_SECONDS = 10.0
#: Session hooks that run at once.
_ENDING_AT_ONCE = 8
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")


class Sessions:
    """One per gateway, whatever its routes; an async context that ends all of them.

    Args:
        max_sessions: conversations remembered.
        max_bytes: of their turns.
    """

    def __init__(self, *, max_sessions: int = 10_000, max_bytes: int = 64 * 1024**2) -> None:
        self._ending = Background(grace_seconds=_LAST_SECONDS)
        self._memory = Memory(max_sessions, max_bytes)
        self._places = asyncio.Semaphore(_ENDING_AT_ONCE)
        self.counts = Counts()

    def link(self, incoming: Incoming, route: Route) -> SessionLink | None:
        """The place of a request in its conversation; ``None`` on a route that trains nothing.

        Raises:
            RequestError: a header that names or ends a session makes no sense.
        """
        if route.swarm is None or route.hooks is None:
            return None
        scope = scope_of(incoming, route.name)
        ends(incoming)
        messages = incoming.call.messages
        said = spoken(messages)
        place = self._memory.place(scope, said, messages)
        if place is not None:
            self.counts.linked[place.known] += 1
            self.counts.signals.update(observe(place, said.digest, messages))
            # a request under way is no silence
            self._goes_on(place.conversation, route.settings.sample_timeout_seconds)
        return SessionLink(self, incoming, route, scope, said, place)

    def remember(
        self, link: SessionLink, completion_id: str, message: dict[str, Any], reward: float | None, choices: int
    ) -> DeliveredTurn:
        """Keep a delivered answer; see :meth:`SessionLink.delivered`."""
        place, route = link.place, link.route
        parent = place.parent if place is not None else None
        if place is not None and not place.conversation.over:
            conversation = place.conversation
        else:
            parent = None
            name = link.scope.name if link.scope.kind == "session" else plain_id(completion_id)
            conversation = self._memory.named(link.scope) or Conversation(link.scope, name, route)
        conversation.route = route
        digest, answer_size = answered(link.said.digest, message)
        body, size = _sharing(link.incoming.call.body, link.said.sizes, parent)
        turn = DeliveredTurn(
            completion_id=plain_id(completion_id),
            key_id=link.scope.key_id,
            body=body,
            message=message,
            reward=reward,
            asked=link.said.digest,
            answered=digest,
            parent=parent,
            choices=choices,
            size=size + answer_size,
        )
        now = asyncio.get_running_loop().time()
        turn.waits(now + route.settings.feedback_window_seconds, now + _session_window(route))
        for leaving in self._memory.add(conversation, turn):
            self._end(leaving, "evicted")
        if ends(link.incoming):
            self._end(conversation, "header")
        else:
            self._goes_on(conversation)
        return turn

    def observed(self, turn: DeliveredTurn, signal: str) -> None:
        """The gateway itself saw ``signal`` happen to an answer."""
        turn.observe(signal, 1.0)
        self.counts.signals[signal] += 1

    def turn(self, completion_id: str, key_id: str) -> DeliveredTurn | None:
        """The answer with that id, in whatever dialect, if it was this key's."""
        found = self._memory.turn(plain_id(completion_id))
        return found[1] if found is not None and found[1].key_id == key_id else None

    def end(self, session_id: str, key_id: str, feedback: Feedback | None = None) -> int:
        """End what a key calls its session ``session_id``, on all routes; returns how many there were.

        Args:
            session_id: as given by header or ``metadata``, or as the gateway names a session in its answers.
            key_id: of the caller.
            feedback: about the whole session.
        """
        mine = [one for one in self._memory if one.scope.key_id == key_id and one.session_id == session_id]
        for conversation in mine:
            conversation.feedback = feedback or conversation.feedback
            self._end(conversation, "endpoint")
        return len(mine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for conversation in self._memory:
            self._end(conversation, "shutdown")
        await self._ending.__aexit__(exc_type, exc, tb)

    @property
    def size(self) -> int:
        """Bytes of the requests and answers that are remembered."""
        return self._memory.size

    def __len__(self) -> int:
        return len(self._memory)

    def as_dict(self) -> dict[str, Any]:
        """For ``/status``."""
        return {"open": len(self._memory), "bytes": self._memory.size, **self.counts.as_dict()}

    def _goes_on(self, conversation: Conversation, more: float = 0.0) -> None:
        if conversation.over:
            return
        self._memory.touch(conversation)
        route = conversation.route
        seconds = route.settings.idle_seconds(credits=_credits(route)) + more
        if conversation.ending is not None:
            conversation.ending.cancel()
        conversation.ending = asyncio.get_running_loop().call_later(seconds, self._end, conversation, "idle")

    def _end(self, conversation: Conversation, by: EndedBy) -> None:
        if conversation.over:
            return
        conversation.over = True
        if conversation.ending is not None:
            conversation.ending.cancel()
        self.counts.ended[by] += 1
        if late := self._memory.remove(conversation):
            seconds = conversation.route.settings.feedback_window_seconds
            asyncio.get_running_loop().call_later(seconds, self._memory.forget, late)
        if _credits(conversation.route) and conversation.turns:
            self._ending.start(self._credit(conversation), f"ending session {conversation.session_id}")
        else:
            _release(conversation)

    async def _credit(self, conversation: Conversation) -> None:
        """Ask what the session earned, and give it to the turns whose groups are open."""
        route, turns = conversation.route, conversation.turns
        assert route.hooks is not None
        context = HookContext(
            num_repeat=route.settings.num_repeat or 1,
            group_id=conversation.session_id,
            deadline_seconds=route.settings.hook_timeout_seconds,
        )
        try:
            async with self._places:
                rewards = await route.hooks.end_session(conversation.session(turns), context) or []
            for turn, reward in zip(turns, rewards, strict=False):
                if reward.value and turn.open:
                    turn.credit = reward.value
                    self.counts.credited += 1
                else:
                    self.counts.credit_dropped += bool(reward.value)
        except HookError as exc:
            logger.error("session %s earns nothing: %s", conversation.session_id, exc)
            self.counts.hook_failures[exc.code or exc.type] += 1
        finally:
            _release(conversation)


class Counts:
    """What sessions did since the start.

    ``linked`` by how a request was known to go on; ``ended`` by why; ``credited`` and ``credit_dropped`` are rewards of
    turns, given by session hooks, that reached their open group, or came too late for it; ``feedback`` that was told
    counts, or came too late to train.
    """

    def __init__(self) -> None:
        self.linked: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.signals: Counter[str] = Counter()
        self.feedback: Counter[str] = Counter()
        self.hook_failures: Counter[str] = Kinds()
        self.credited = 0
        self.credit_dropped = 0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "linked": dict(self.linked),
            "ended": dict(self.ended),
            "signals": dict(self.signals),
            "feedback": dict(self.feedback),
            "hook_failures": dict(self.hook_failures),
            "credited": self.credited,
            "credit_dropped": self.credit_dropped,
        }


def plain_id(completion_id: str) -> str:
    """A completion's id without what its dialect puts before it."""
    for prefix in _ID_PREFIXES:
        if completion_id.startswith(prefix):
            return completion_id.removeprefix(prefix)
    return completion_id


def _session_window(route: Route) -> float:
    return route.settings.session_window_seconds if _credits(route) else 0.0


def _credits(route: Route) -> bool:
    """Whether the route's hooks say what a session as a whole earns."""
    return route.hooks is not None and route.hooks.ends_sessions


def _release(conversation: Conversation) -> None:
    for turn in conversation.turns:
        turn.session_over()


def _sharing(body: dict[str, Any], sizes: tuple[int, ...], parent: DeliveredTurn | None) -> tuple[dict[str, Any], int]:
    """``body`` with what it has in common with the turn before it as the same objects, and the bytes of the rest: a
    conversation of n turns is then kept, and copied for hooks, in the size of its last request and not n times it."""
    earlier: dict[str, Any] = parent.body if parent is not None else {}
    shared = dict(body)
    size = 0
    for name, value in body.items():
        if name == "messages":
            continue
        if name in earlier and earlier[name] == value:
            shared[name] = earlier[name]
        else:
            size += size_of(value)
    before: list[Any] = [*earlier.get("messages", []), parent.message] if parent is not None else []
    # a raw prompt has none
    messages: list[Any] = list(body.get("messages") or ())
    for index, message in enumerate(messages):
        if index < len(before) and before[index] == message:
            messages[index] = before[index]
        else:
            size += sizes[index] or size_of(message)
    if messages:
        shared["messages"] = messages
    return shared, size
