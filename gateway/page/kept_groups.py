"""The groups that the page shows: the latest ones of this gateway, with all of their answers, in memory.

Invariant: secrets are removed before a text is kept; the oldest groups leave when the bytes are used up. What the page
says that the hook thought is what it said before anybody judged.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from adapters.dialects.jsons import encode
from gateway.observability.scrubbing import text_without_secrets, without_secrets
from gateway.sessions.conversation import DeliveredTurn
from gateway.sessions.watching import GroupWatcher, WatchedGroup
from gateway.types import Caller
from reward_hooks import Candidate, GroupScore
from reward_hooks.contract import EQUAL_WITHIN, texts_of
from swarm.errors import NotFoundError

#: Which groups, and in which order.
View = Literal["newest", "unjudged", "best", "worst", "spread", "disagree", "equal"]
VIEWS: tuple[str, ...] = get_args(View)
#: Words of a search that count.
_MOST_WORDS = 10
#: Characters of a prompt in a row, and of one text that is kept.
_ROW_TEXT, _MOST_TEXT = 200, 64 * 1024
_NAMED = ("id", "route", "key", "session", "request_id", "hook", "why", "fate")
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
    that is decided. ``picks`` are the latest judgements, by who judged."""

    id: str
    at: float
    route: str
    key: str
    session: str
    request_id: str
    prompt: list[Any]
    tools: int
    hook: str
    code: str
    policy: int | None
    why: str = ""
    answers: dict[int, KeptAnswer] = field(default_factory=dict[int, KeptAnswer])
    turn: DeliveredTurn | None = None
    fate: str = ""
    user: float | None = None
    signals: dict[str, float] = field(default_factory=dict[str, float])
    picks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
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
        answers = list(self.answers.values())
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
            "picks": {who: pick["pick"] for who, pick in self.picks.items()},
            "disagrees": self.disagrees,
        }

    def whole(self) -> dict[str, Any]:
        """All of it."""
        fields = {name: getattr(self, name) for name in _NAMED}
        return {
            **self.row(),
            **fields,
            "prompt": self.prompt,
            "tools": self.tools,
            "code": self.code,
            "signals": self.signals,
            "judgements": self.picks,
            "answers": [vars(answer) for answer in self.answers.values()],
        }


class KeptGroups(GroupWatcher):
    """The latest groups.

    Args:
        max_bytes: of all of them together.
        changed: called with each group that is new or has changed.
        forgotten: called when groups were forgotten that may not be kept.
    """

    def __init__(
        self, max_bytes: int, changed: Callable[[KeptGroup], None], forgotten: Callable[[], None] = lambda: None
    ) -> None:
        self._max_bytes = max_bytes
        self._changed = changed
        self._forgotten = forgotten
        self._groups: OrderedDict[str, KeptGroup] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def judged(self, group: WatchedGroup) -> None:
        kept = self._groups.get(group.group_id)
        if kept is None:
            kept = self._groups[group.group_id] = _kept(group)
        # rewards of two calls cannot be compared: all are of the last one that knew no feedback
        first = all(candidate.feedback is None for candidate in group.candidates) and not kept.picks
        kept.turn, kept.session = group.turn or kept.turn, text_without_secrets(group.session) or kept.session
        why = "" if group.failure is None else group.failure.public_message or str(group.failure)
        kept.why = text_without_secrets(why)[:_ROW_TEXT]
        for index, candidate in zip(group.indices, group.candidates, strict=True):
            if index not in kept.answers:
                kept.answers[index] = _answer(index, candidate)
        if group.score is not None:
            _take(kept, group.indices, group.score, first=first)
        self._weigh(kept)
        self._changed(kept)

    def settling(self, group_id: str, delivered: Sequence[int], turn: DeliveredTurn | None) -> None:
        kept = self._groups.get(group_id)
        if kept is None:
            return
        kept.turn = turn or kept.turn
        for index in delivered:
            if index in kept.answers:
                kept.answers[index].delivered = True
        self._changed(kept)

    def over(self, group_id: str, reason: str | None) -> None:
        kept = self._groups.get(group_id)
        if kept is None:
            return
        kept.take_feedback()
        kept.fate = "trained" if reason is None else str(reason)
        # the conversation's memory is its own
        kept.turn = None
        self._changed(kept)

    def forget(self, group_id: str) -> None:
        if (kept := self._groups.pop(group_id, None)) is not None:
            self.bytes -= kept.size
            self._forgotten()

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

    def select(
        self,
        caller: Caller,
        view: str = "newest",
        words: str = "",
        route: str = "",
        key: str = "",
        policy: int | None = None,
    ) -> list[KeptGroup]:
        """The groups that fit, in the order of ``view``; those that the caller's key opens alone."""
        fitting = [
            group
            for group in reversed(self._groups.values())
            if caller.opens(group.route)
            and (not route or group.route == route)
            and (not key or group.key == key)
            and (policy is None or group.policy == policy)
        ]
        if words:
            wanted = words.lower().split()[:_MOST_WORDS]
            fitting = [group for group in fitting if _has(group, wanted)]
        return _in_order(fitting, view)

    def _weigh(self, kept: KeptGroup) -> None:
        size = _OVERHEAD + len(encode(kept.prompt))
        for answer in kept.answers.values():
            size += _OVERHEAD // 4 + len(str(answer.tool_calls)) + len(str(answer.components))
            size += len(answer.text) + len(answer.reasoning) + len(answer.reason)
        self.bytes += size - kept.size
        kept.size = size
        while self.bytes > self._max_bytes and len(self._groups) > 1:
            _, leaving = self._groups.popitem(last=False)
            self.bytes -= leaving.size


def _kept(group: WatchedGroup) -> KeptGroup:
    caller, body = group.incoming.caller, group.incoming.call.body
    versions = [candidate.policy_version for candidate in group.candidates if candidate.policy_version is not None]
    return KeptGroup(
        id=group.group_id,
        at=time.time(),
        route=group.route,
        key=caller.label or caller.key_id,
        session=group.session,
        request_id=group.incoming.request_id,
        prompt=[_cut(without_secrets(message)) for message in body.get("messages") or ()],
        tools=len(body.get("tools") or ()),
        hook=group.hook,
        code=group.code,
        policy=max(versions, default=None),
    )


def _answer(index: int, candidate: Candidate) -> KeptAnswer:
    message = candidate.message
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return KeptAnswer(
        index=index,
        text=text_without_secrets(candidate.text)[:_MOST_TEXT],
        reasoning=text_without_secrets(thought)[:_MOST_TEXT] if isinstance(thought, str) else "",
        tool_calls=_cut(without_secrets(candidate.tool_calls)),
        finish=candidate.finish_reason,
        tokens=candidate.completion_tokens,
        version=candidate.policy_version,
        seconds=candidate.latency_seconds,
    )


def _take(kept: KeptGroup, indices: Iterable[int], score: GroupScore, *, first: bool) -> None:
    for index, reward in zip(indices, score.rewards, strict=True):
        answer = kept.answers[index]
        if first or answer.reward is None:
            answer.reward = reward.value
            answer.components = dict(reward.components)
            answer.reason = text_without_secrets(reward.reason)[:_MOST_TEXT]
        answer.final = reward.value


def _cut(value: Any) -> Any:
    """``value`` (JSON) with every text cut, and without pictures."""
    if isinstance(value, str):
        return value[:100] + " …" if value.startswith("data:") else value[:_MOST_TEXT]
    if isinstance(value, dict):
        return {str(name): _cut(field_value) for name, field_value in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else value


def _has(group: KeptGroup, words: Sequence[str]) -> bool:
    texts = _texts(group)
    return all(word in texts for word in words)


def _texts(group: KeptGroup) -> str:
    texts = [text for message in group.prompt for text in texts_of(message)]
    for answer in group.answers.values():
        texts += (answer.text, answer.reason)
    return " ".join((*texts, group.id, group.session, group.why)).lower()


def _in_order(groups: list[KeptGroup], view: str) -> list[KeptGroup]:
    def mean(group: KeptGroup) -> float:
        return sum(group.rewards) / len(group.rewards)

    rated = [group for group in groups if group.rewards]
    match view:
        case "unjudged":
            # what still trains comes first
            return sorted((group for group in groups if not group.picks), key=lambda group: not group.open)
        case "best":
            return sorted(rated, key=lambda group: -mean(group))
        case "worst":
            return sorted(rated, key=mean)
        case "spread":
            return sorted(rated, key=lambda group: min(group.rewards) - max(group.rewards))
        case "disagree":
            return [group for group in groups if group.disagrees]
        case "equal":
            return [group for group in rated if len(group.rewards) > 1 and not group.best]
        case _:
            return groups
