"""Conversations: a conversation has the turns that were delivered, which form a tree where the user went back, and its
holders, who may go on with it. A watcher is shown the groups of a conversation.

Invariant: feedback after a group's submission stays visible to hooks of later requests, and never trains. Only groups
whose texts may be kept are shown; a watcher holds nothing up and changes nothing by watching.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, cast

import orjson

from gateway.config.route import RouteSettings
from gateway.data.consent import PrivacyRules
from gateway.sessions.open_groups import Hold, OpenGroups
from gateway.stats import Accounted
from gateway.types import Incoming
from reward_hooks import Candidate, Feedback, GroupScore, HookRunner, Session, Turn
from swarm.errors import HookError, RequestError
from swarm.subjects import Subject, user_digest
from swarm.types import Notes

#: Names the session; any text of the application's choice.
SESSION = "x-swarm-session"
#: Headers in which agents name their sessions: Claude Code, Codex (``thread-id`` names its sub-agent), opencode.
_AGENT_SESSIONS = ("x-claude-code-session-id", "session-id", "x-session-id")
#: All headers by which agents tell their sessions and sub-agents apart.
AGENT_HEADERS = frozenset({*_AGENT_SESSIONS, "x-claude-code-agent-id", "thread-id", "x-parent-session-id"})
#: Characters of a session's name.
_LONGEST = 256
#: Sub-agents of a session that have ledgers of their own, and the ledger of the others.
_AGENTS, _OTHERS = 64, "(others)"
#: Instructions do not count: applications put the time of day into them.
INSTRUCTIONS = frozenset({"system", "developer"})


@dataclass
class Fate:
    """Answers that shared one fate: the tokens that the engine sampled for them, and those of their prompts, which are
    context in a trained sequence and masked in its loss."""

    answers: int = 0
    sampled: int = 0
    masked: int = 0


@dataclass
class AgentLedger:
    """What became of all that was sampled for one agent of a session.

    Attributes:
        requests: that were to be sampled and trained.
        passed: requests that got one untrained answer, by the reason (``not_chosen``: ``train_fraction`` or a header).
        under_way: groups whose fate is not decided.
        trained: answers that the swarm server has on disk with their rewards.
        dropped: the others, by why.
        accounted: what the swarm server itself counted in the episodes that it took.
    """

    requests: int = 0
    passed: Counter[str] = field(default_factory=Counter[str])
    under_way: int = 0
    trained: Fate = field(default_factory=Fate)
    dropped: dict[str, Fate] = field(default_factory=dict[str, Fate])
    accounted: Accounted = field(default_factory=Accounted)

    def add(self, reason: str | None, answers: int, sampled: int, masked: int) -> None:
        """The fate of a group is decided; ``reason``: why it is not trained, if it is not."""
        self.under_way -= 1
        fate = self.trained if reason is None else self.dropped.setdefault(str(reason), Fate())
        fate.answers += answers
        fate.sampled += sampled
        fate.masked += masked


@dataclass
class SessionReport:
    """One session on one route: by its sub-agents, the main one is ``""``.

    Attributes:
        ended: why the session is over; empty while it goes on.
        credited, credit_dropped: turns to which the outcome came in time, or too late.
    """

    route: str
    agents: dict[str, AgentLedger] = field(default_factory=dict[str, AgentLedger])
    ended: str = ""
    credited: int = 0
    credit_dropped: int = 0

    def ledger(self, agent: str) -> AgentLedger:
        """Of a sub-agent; clients name these, and what is beyond the first 64 shares one ledger."""
        has_ledger = agent in self.agents or len(self.agents) < _AGENTS
        return self.agents.setdefault(agent if has_ledger else _OTHERS, AgentLedger())


class Scope(NamedTuple):
    """Who may continue a conversation: callers with one key on one route that name the same session or user; ``agent``:
    a session that an agent names by headers of its own."""

    route: str
    key_id: str
    kind: Literal["session", "agent", "user", "anyone"]
    name: str

    @property
    def session(self) -> str:
        """The name of the session; empty where none is named."""
        return self.name if self.kind in ("session", "agent") else ""


def heard(feedback: Feedback, rules: PrivacyRules | None) -> Feedback:
    """What hooks hear of ``feedback``: not its texts where one of them is private, since what a hook says is kept."""
    if rules is None or not rules.private([feedback.comment, feedback.better]):
        return feedback
    return feedback.model_copy(update={"comment": "", "better": ""})


@dataclass(eq=False)
class DeliveredTurn:
    """One request of a conversation (in Chat Completions form) and the message that was delivered for it.

    Attributes:
        completion_id: names the answer, without its dialect's prefix.
        agent: the sub-agent that asked; empty: the main one.
        asked, answered, inner: digests of the conversation before and with the answer, see :class:`Digests`.
        parent: the turn that this one continues.
        choices: how many answers were delivered.
        size: bytes that only this turn needs.
        notes: whose request it was.
        rules: what is private in what people say of it.
        choice_feedback: the caller's feedback, by index among the delivered answers.
        judgements: of people who looked at the group, by index of the answer in it.
        observed: signals about the best delivered answer, by name.
        left: the user went back to an earlier turn; this turn gets no credit from the session.
        retried: the client lost this answer on the way and asked again; the turn is not counted.
        credit: from the end of the session, added to the advantage of the best delivered answer.
    """

    completion_id: str
    key_id: str
    body: dict[str, Any]
    message: dict[str, Any]
    reward: float | None
    asked: bytes
    answered: bytes
    parent: DeliveredTurn | None
    inner: bytes = b""
    agent: str = ""
    choices: int = 1
    size: int = 0
    notes: Notes = field(default_factory=Notes)
    rules: PrivacyRules | None = None
    choice_feedback: dict[int, Feedback] = field(default_factory=dict[int, Feedback])
    judgements: dict[int, Feedback] = field(default_factory=dict[int, Feedback])
    observed: dict[str, float] = field(default_factory=dict[str, float])
    left: bool = False
    retried: bool = False
    credit: float = 0.0
    _feedback_until: float = float("-inf")
    _hold: Hold | None = None

    @property
    def open(self) -> bool:
        """Whether feedback may still train."""
        return self._hold is not None

    def waits(self, feedback_seconds: float, session_seconds: float) -> None:
        """The group stays open for so long: for feedback, and for the session's end."""
        now = asyncio.get_running_loop().time()
        self._feedback_until = now + feedback_seconds
        if (seconds := max(feedback_seconds, session_seconds)) > 0:
            self._hold = Hold(now + seconds)

    def session_over(self) -> None:
        """Stop waiting for the session's end."""
        if self._hold is not None:
            self._hold.shorten(self._feedback_until)

    async def closing(self, groups: OpenGroups) -> Self:
        """Wait until the group is to be submitted: at once, when its windows are over, or when ``groups`` closes it;
        later feedback does not count."""
        if self._hold is not None:
            try:
                await groups.keep(self._hold)
            finally:
                self._hold = None
        return self

    def feedback(self) -> dict[int, Feedback]:
        """Feedback and signals, by index among the delivered answers; the caller's own signals take precedence."""
        feedback = dict(self.choice_feedback)
        if self.observed:
            best = feedback.get(0) or Feedback()
            feedback[0] = best.model_copy(update={"signals": {**self.observed, **best.signals}})
        return feedback

    def feedback_in_group(self, delivered: Sequence[int]) -> dict[int, Feedback]:
        """Feedback and judgements by index in the group, in which ``delivered`` are the delivered answers, best first;
        of a rating by the user and one by a judgement, the judgement's counts."""
        feedback = {delivered[at]: stated for at, stated in self.feedback().items() if at < len(delivered)}
        for index, judgement in self.judgements.items():
            signals = {**feedback.get(index, judgement).signals, **judgement.signals}
            feedback[index] = judgement.model_copy(update={"signals": signals})
        return feedback

    def observe(self, signal: str, strength: float) -> None:
        """Note a signal; of one signal the strongest observation stands."""
        self.observed[signal] = max(strength, self.observed.get(signal, 0.0))

    def as_turn(self) -> Turn:
        """For hooks."""
        return Turn(
            completion_id=self.completion_id,
            request=self.body,
            message=self.message,
            reward=self.reward,
            feedback=self.feedback().get(0),
            agent=self.agent,
        )

    def path(self) -> list[DeliveredTurn]:
        """The turns up to and with this one, oldest first."""
        turns: list[DeliveredTurn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]


@dataclass(eq=False)
class Conversation:
    """``settings`` and ``hooks`` are of its route; ``feedback`` is about the whole of it; ``size`` is in bytes;
    ``ending`` ends it when it idles; ``under_way`` are its requests that are to be sampled, and how long each keeps it
    from idling (on the loop's clock); ``task`` is what it worked on, if that was said;
    ``children`` are the names of its own that sub-agents have."""

    scope: Scope
    session_id: str
    settings: RouteSettings
    hooks: HookRunner
    report: SessionReport
    turns: list[DeliveredTurn] = field(default_factory=list[DeliveredTurn])
    size: int = 0
    over: bool = False
    feedback: Feedback | None = None
    ending: asyncio.TimerHandle | None = None
    under_way: dict[object, float] = field(default_factory=dict[object, float])
    task: str = ""
    children: set[Scope] = field(default_factory=set[Scope])

    def session(self, turns: list[DeliveredTurn]) -> Session:
        """``turns`` for hooks."""
        return Session(session_id=self.session_id, turns=[turn.as_turn() for turn in turns], feedback=self.feedback)

    def is_of(self, subject: Subject) -> bool:
        """Whether it is the subject's, or has a turn of the subject's."""
        # a name that was private is a digest already
        users = (user_digest(self.scope.name), self.scope.name) if self.scope.kind == "user" else ("",)
        named = [Notes(key=self.scope.key_id, session=self.session_id, user=user) for user in users]
        return any(subject.fits(notes) for notes in (*named, *(turn.notes for turn in self.turns)))

    def after(self, parent: DeliveredTurn | None, agent: str) -> list[DeliveredTurn]:
        """The turns of ``agent`` that continue ``parent`` (``None``: that begin), oldest first."""
        return [turn for turn in self.turns if turn.parent is parent and turn.agent == agent]


@dataclass(frozen=True, slots=True)
class WatchedGroup:
    """A group that its hook has just judged.

    Attributes:
        session: the name of its conversation; may be empty.
        notes: whose request it is, and where the hook comes from.
        indices: of the answers in the group; ``candidates`` and the rewards of ``score`` are in this order.
        score: the rewards; ``None``: the hook gave none, ``failure`` says why.
        turn: the delivered answer, once there is one that may be remembered.
    """

    group_id: str
    incoming: Incoming
    route: str
    session: str
    notes: Notes
    indices: Sequence[int]
    candidates: Sequence[Candidate]
    score: GroupScore | None
    failure: HookError | None
    turn: DeliveredTurn | None


class GroupWatcher(Protocol):
    """Is called in the event loop of the requests; what it raises is logged."""

    def judged(self, group: WatchedGroup) -> None:
        """The hook has judged; once more where feedback or further answers came."""
        ...

    def settling(self, group_id: str, delivered: Sequence[int], turn: DeliveredTurn | None) -> None:
        """The answers with these indices are delivered, the best first; the group is open or waits to be submitted."""
        ...

    def over(self, group_id: str, reason: str | None) -> None:
        """The group is trained, or, with a ``reason``, not."""
        ...

    def forget(self, group_id: str) -> None:
        """The group's texts may not be kept after all."""
        ...

    def compared(self, group_id: str, difference: float) -> None:
        """The group's answers were judged beside the incumbent's: their mean reward is better by ``difference``."""
        ...

    async def erase(self, fits: Callable[[Notes], bool]) -> dict[str, int]:
        """Delete what is kept of requests whose notes fit; how much there was, by name.

        Raises:
            OSError: a file cannot be rewritten.
        """
        ...


def names_of(incoming: Incoming, route: str) -> tuple[Scope, str, str]:
    """Who may go on with a request's conversation; the sub-agent that asks (empty: the main one); and, where that has a
    session's name of its own, this name.

    A session is named by our header, else by ``metadata.session_id`` of the body, else by the agent's own headers or
    the JSON in Anthropic's ``metadata.user_id``; a user by the end user in the body.

    Raises:
        RequestError: our header is longer than 256 characters.
    """
    return _names_in(incoming.headers, incoming.call.body, incoming.caller.key_id, route)


def whose(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str, str]:
    """The end user and the session that a request names, in whatever dialect, and the session's name that a sub-agent
    has of its own; empty where it names none."""
    metadata: Any = body.get("metadata")
    anthropics = cast("dict[str, Any]", metadata).get("user_id") if isinstance(metadata, dict) else None
    user = user_of(body) or user_of({"user": anthropics})
    try:
        scope, _, own = _names_in(headers, {"user": user, "metadata": metadata}, "", "")
    except RequestError:
        return user, "", ""
    return user, scope.session, own


def _names_in(headers: Mapping[str, str], body: Mapping[str, Any], key_id: str, route: str) -> tuple[Scope, str, str]:
    agent = parent = ""
    own = next((session for name in _AGENT_SESSIONS if (session := headers.get(name, ""))), "")
    if own:
        # opencode's sub-agents have sessions of their own, Codex's and Claude Code's names within their session
        parent = headers.get("x-parent-session-id", "")
        thread = headers.get("thread-id", own)
        agent = (
            headers.get("x-claude-code-agent-id", "") or (own if parent else "") or (thread if thread != own else "")
        )
    if name := headers.get(SESSION, "").strip():
        if len(name) > _LONGEST:
            raise RequestError(f"the header {SESSION} is longer than {_LONGEST} characters", param=SESSION)
        return Scope(route, key_id, "session", name), agent[:_LONGEST], ""
    metadata: Any = body.get("metadata")
    named = cast("dict[str, Any]", metadata).get("session_id") if isinstance(metadata, dict) else None
    if isinstance(named, str) and 0 < len(named) <= _LONGEST:
        return Scope(route, key_id, "session", named), agent[:_LONGEST], ""
    user = user_of(body)
    own = own or _session_in(user)
    if own and max(len(own), len(parent), len(agent)) <= _LONGEST:
        return Scope(route, key_id, "agent", parent or own), agent, own if parent else ""
    if user:
        return Scope(route, key_id, "user", user), "", ""
    return Scope(route, key_id, "anyone", ""), "", ""


def user_of(body: Mapping[str, Any]) -> str:
    """The end user whom a body names; empty if it names nobody."""
    users = (body.get(name) for name in ("safety_identifier", "user"))
    return next((user for user in users if isinstance(user, str) and user), "")


def _session_in(user: str) -> str:
    """The session that Claude Code names in Anthropic's ``metadata.user_id``."""
    if not user.startswith("{"):
        return ""
    try:
        fields: Any = orjson.loads(user)
    except ValueError:
        return ""
    named = fields.get("session_id")
    return named if isinstance(named, str) else ""
