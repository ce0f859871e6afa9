"""The groups that the page shows: the latest ones of this gateway, with all of their answers, in memory.

Invariant: secrets are removed before a text is kept; the oldest groups leave when the bytes are used up. What the page
says that the hook thought is of one call, which knew of no feedback if there was such a call.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapters.dialects.jsons import encode
from gateway.observability.scrubbing import text_without_secrets, without_secrets
from gateway.page.stream import Events
from gateway.sessions.conversation import DeliveredTurn, GroupWatcher, WatchedGroup
from gateway.types import Caller
from reward_hooks import Candidate
from reward_hooks.contract import EQUAL_WITHIN, texts_of
from swarm.errors import NotFoundError
from swarm.types import Notes

#: Characters of a prompt in a row, and of one text that is kept.
_ROW_TEXT, MOST_TEXT = 200, 64 * 1024
#: What only the whole of a group has.
_IN_WHOLE = ("prompt", "tools", "session", "signals")
#: Bytes of a group beside its texts.
_OVERHEAD = 2000


@dataclass
class KeptAnswer:
    """One answer; ``reward`` and its reasons are the hook's first, ``final`` its last, after feedback."""

    index: int
    text: str
    reasoning: str
    tool_calls: Any
    finish: str
    tokens: int
    version: int | None
    seconds: float
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict[str, float])
    reason: str = ""
    final: float | None = None
    delivered: bool = False


@dataclass
class KeptGroup:
    """One group; ``prompt`` are its messages, ``at`` is in Unix seconds, ``fate`` says what became of it: empty until
    that is decided. ``picks`` are the latest judgements, by who judged; ``knew``: the rewards are of a call that knew
    of feedback; ``lead``: of the mean reward before the incumbent's."""

    id: str
    at: float
    route: str
    key: str
    session: str
    notes: Notes
    prompt: list[Any]
    tools: int
    policy: int | None
    why: str = ""
    answers: dict[int, KeptAnswer] = field(default_factory=dict[int, KeptAnswer])
    turn: DeliveredTurn | None = None
    fate: str = ""
    user: float | None = None
    signals: dict[str, float] = field(default_factory=dict[str, float])
    picks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    knew: bool = False
    lead: float | None = None
    erased: bool = False
    size: int = 0

    @property
    def open(self) -> bool:
        """Whether a judgement still trains."""
        return not self.fate and self.turn is not None and self.turn.open

    @property
    def rewards(self) -> list[float]:
        """The hook's, of the answers that have one."""
        return [answer.reward for answer in self.answers.values() if answer.reward is not None]

    @property
    def best(self) -> list[int]:
        """Indices of the answers that the hook likes best; none where it gave no rewards or all are equal."""
        rewards = self.rewards
        if not rewards or max(rewards) - min(rewards) <= EQUAL_WITHIN:
            return []
        rated = [answer for answer in self.answers.values() if answer.reward is not None]
        return [answer.index for answer in rated if (answer.reward or 0.0) >= max(rewards) - EQUAL_WITHIN]

    @property
    def disagrees(self) -> bool:
        """Whether a person preferred another answer than the hook, or the user disliked the hook's best one."""
        best = self.best
        if any(best and pick["pick"] not in best for pick in self.picks.values()):
            return True
        return self.user is not None and self.user < 0 and any(self.answers[index].delivered for index in best)

    def take_feedback(self) -> None:
        """Look at what the user gave to the delivered answer by now."""
        if self.turn is not None and (feedback := self.turn.feedback().get(0)) is not None:
            self.user, self.signals = feedback.rating, feedback.signals

    def row(self) -> dict[str, Any]:
        """What a list shows of it."""
        self.take_feedback()
        answers, numbers = list(self.answers.values()), {index: number for number, index in enumerate(self.answers)}
        asked = [text for message in self.prompt for text in texts_of(message) if message.get("role") == "user"]
        return {
            "id": self.id,
            "at": self.at,
            "route": self.route,
            "key": self.key,
            "policy": self.policy,
            "prompt": (asked[-1] if asked else "")[:_ROW_TEXT],
            "size": len(answers),
            "rewards": [answer.reward for answer in answers],
            "delivered": [number for number, answer in enumerate(answers) if answer.delivered],
            "open": self.open,
            "fate": self.fate,
            "why": self.why,
            "user": self.user,
            "picks": {who: numbers.get(pick["pick"]) for who, pick in self.picks.items()},
            "disagrees": self.disagrees,
            "lead": self.lead,
        }

    def whole(self) -> dict[str, Any]:
        """All of it."""
        return {
            **self.row(),
            **{name: getattr(self, name) for name in _IN_WHOLE},
            "hook": self.notes.hook,
            "judgements": self.picks,
            "answers": [vars(answer) for answer in self.answers.values()],
        }


class KeptGroups(GroupWatcher):
    """The latest groups.

    Args:
        max_bytes: of all of them together.
        events: get the row of each group that is new or has changed.
        erase: deletes the judgements whose notes fit; how many there were.
    """

    def __init__(
        self, max_bytes: int, events: Events, erase: Callable[[Callable[[Notes], bool]], Awaitable[int]]
    ) -> None:
        self._max_bytes = max_bytes
        self._events = events
        self._erase = erase
        self._groups: OrderedDict[str, KeptGroup] = OrderedDict()
        self.bytes = 0

    def judged(self, group: WatchedGroup) -> None:
        if (kept := self._groups.get(group.group_id)) is None:
            kept = self._groups[group.group_id] = _kept(group)
        # rewards of two calls cannot be compared
        first = all(candidate.feedback is None for candidate in group.candidates)
        kept.turn, kept.session = group.turn or kept.turn, text_without_secrets(group.session) or kept.session
        why = "" if group.failure is None else group.failure.public_message or str(group.failure)
        kept.why = text_without_secrets(why)[:_ROW_TEXT]
        for index, candidate in zip(group.indices, group.candidates, strict=True):
            if index not in kept.answers:
                kept.answers[index] = _answer(index, candidate)
        rewards = group.score.rewards if group.score is not None else []
        take = bool(rewards) and (first or not kept.rewards)
        kept.knew = not first if take else kept.knew
        for index, reward in zip(group.indices, rewards, strict=False):
            answer = kept.answers[index]
            if take:
                answer.reward = reward.value
            if take or answer.reward is None:
                answer.components = dict(reward.components)
                answer.reason = text_without_secrets(reward.reason)[:MOST_TEXT]
            answer.final = reward.value
        self.touched(kept)

    def settling(self, group_id: str, delivered: Sequence[int], turn: DeliveredTurn | None) -> None:
        if (kept := self._groups.get(group_id)) is not None:
            kept.turn = turn or kept.turn
            for index in kept.answers.keys() & set(delivered):
                kept.answers[index].delivered = True
            self._changed(kept)

    def over(self, group_id: str, reason: str | None) -> None:
        if (kept := self._groups.get(group_id)) is not None:
            kept.take_feedback()
            kept.fate = "trained" if reason is None else str(reason)
            # the conversation's memory is its own
            kept.turn = None
            self._changed(kept)

    def forget(self, group_id: str) -> None:
        if (kept := self._groups.get(group_id)) is not None:
            self._drop([kept])

    def compared(self, group_id: str, difference: float) -> None:
        if (kept := self._groups.get(group_id)) is not None:
            kept.lead = difference
            self._changed(kept)

    async def erase(self, fits: Callable[[Notes], bool]) -> dict[str, int]:
        gone = [kept for kept in self._groups.values() if fits(kept.notes)]
        self._drop(gone)
        return {"page_groups": len(gone), "judgements": await self._erase(fits)}

    def _drop(self, gone: Iterable[KeptGroup]) -> None:
        for kept in gone:
            kept.erased = True
            self.bytes -= self._groups.pop(kept.id).size
        self._events.forget()

    def _changed(self, kept: KeptGroup) -> None:
        self._events.add(kept.id, kept.route, kept.row())

    def group(self, group_id: str, caller: Caller) -> KeptGroup:
        """The group of this id.

        Raises:
            NotFoundError: there is none, or the caller's key does not open its route.
        """
        kept = self._groups.get(group_id)
        if kept is None or not caller.opens(kept.route):
            raise NotFoundError(
                "this group is not here: the page shows the latest groups of this gateway since its start",
                code="group_not_found",
            )
        return kept

    def opened(self, caller: Caller) -> list[KeptGroup]:
        """The groups that the caller's key opens, the newest first."""
        return [group for group in reversed(self._groups.values()) if caller.opens(group.route)]

    def touched(self, kept: KeptGroup) -> None:
        """Weigh a group that has changed, and pass it on; the oldest groups leave."""
        if self._groups.get(kept.id) is not kept:
            return
        size = _OVERHEAD + len(encode(kept.prompt)) + len(encode(kept.picks))
        for answer in kept.answers.values():
            size += _OVERHEAD // 4 + len(str(answer.tool_calls)) + len(str(answer.components))
            size += len(answer.text) + len(answer.reasoning) + len(answer.reason)
        self.bytes += size - kept.size
        kept.size = size
        while self.bytes > self._max_bytes and len(self._groups) > 1:
            _, leaving = self._groups.popitem(last=False)
            self.bytes -= leaving.size
        self._changed(kept)


def _kept(group: WatchedGroup) -> KeptGroup:
    caller, call = group.incoming.caller, group.incoming.call
    versions = [candidate.policy_version for candidate in group.candidates if candidate.policy_version is not None]
    return KeptGroup(
        id=group.group_id,
        at=time.time(),
        route=group.route,
        key=caller.label or caller.key_id,
        session=group.session,
        notes=group.notes,
        prompt=[_cut(without_secrets(message)) for message in call.messages],
        tools=len(call.body.get("tools") or ()),
        policy=max(versions, default=None),
    )


def _answer(index: int, candidate: Candidate) -> KeptAnswer:
    message = candidate.message
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return KeptAnswer(
        index=index,
        text=_shortened(text_without_secrets(candidate.text)),
        reasoning=_shortened(text_without_secrets(thought)) if isinstance(thought, str) else "",
        tool_calls=_cut(without_secrets(candidate.tool_calls)),
        finish=candidate.finish_reason,
        tokens=candidate.completion_tokens,
        version=candidate.policy_version,
        seconds=candidate.latency_seconds,
    )


def _shortened(text: str) -> str:
    """``text``; one that is too long ends with how much of it is left out."""
    more = len(text) - MOST_TEXT
    return f"{text[:MOST_TEXT]}\n[{more} more characters are not kept]" if more > 0 else text


def _cut(value: Any) -> Any:
    """``value`` (JSON) with every text cut, and without pictures."""
    if isinstance(value, str):
        return value[:100] + " …" if value.startswith("data:") else _shortened(value)
    if isinstance(value, dict):
        return {str(name): _cut(field_value) for name, field_value in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else value
