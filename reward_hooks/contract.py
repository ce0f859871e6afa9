"""The hook contract: the types that reward hooks receive and return, and the functions of a hook file.

Invariant: a reward is a finite number with its reasons; there is no default reward and no random score.

A hook folder holds one file per hook, each with one function of the file's own name, sync or async::

    # on_compute_relative_reward.py (required)
    def on_compute_relative_reward(task: Task, candidates: list[Candidate], context: HookContext) -> list[float]:
        return [1.0 / (1 + len(candidate.text)) for candidate in candidates]  # or a Reward for each

    # on_user_submit_new_requests.py (optional; without it: N identical requests, task_id = request_id)
    def on_user_submit_new_requests(request: UserRequest, context: HookContext) -> list[dict] | Submission:
        return [dict(request.body) for _ in range(context.num_repeat)]

    # on_session_end.py (optional; without it: a session as a whole earns nothing)
    def on_session_end(session: Session, context: HookContext) -> float | None:
        return session.feedback.rating if session.feedback else None

Other files of the folder can be imported by name, as in ``from helper import grade`` (before an installed module of
the same name). ``load_hooks`` documents the other ways to name hooks.

``on_compute_relative_reward`` runs once per user request, with all its answers (perhaps one, and fewer than N behind a
gate), and returns one reward per candidate, in order. Only the differences within the group train the model: equal
rewards teach nothing, and are right for equally good answers. A hook that cannot score raises ``HookError`` with the
reason and never makes a number up: the group is not trained, the reason is counted, and the user still gets an answer.

``on_user_submit_new_requests`` runs before sampling and returns N request bodies (``context.num_repeat``), identical or
varied (temperature, system prompt, tools), or a ``Submission`` with their task. ``PassThrough()`` says that this
request is not to be trained: it is answered once, and no reward hook is asked.

``on_session_end`` runs once at the end of a conversation. It returns the outcome of the whole, one number, which is
compared with other sessions of the same task and spread over the turns (``gateway/sessions/credit.py``); or one number
per turn, in order, which is compared with nothing; or ``None`` where nothing is known. What a turn is given, times
``session_weight``, is an advantage of the answer that was delivered, beside that of its own reward in its group.

All are pure functions of their arguments, which are copies. A hook that raises, hangs, or returns something else drops
the group from training; the user still gets an answer.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Annotated, Any, Literal, cast

from pydantic import Field, FiniteFloat

from swarm.types import MOST_REWARD, Model, RewardNumber, Task

#: Names of the hook functions, of the files that hold them, and of their positional parameters.
SUBMIT = "on_user_submit_new_requests"
REWARD = "on_compute_relative_reward"
SESSION_END = "on_session_end"
PARAMETERS: dict[str, tuple[str, ...]] = {
    SUBMIT: ("request", "context"),
    REWARD: ("task", "candidates", "context"),
    SESSION_END: ("session", "context"),
}

#: Names of rules for requests that pass through; they stand in headers and metrics.
RULE_NAME = r"^[A-Za-z0-9._-]{1,60}$"

#: Code of a hook's error where it needs the tokens of an answer whose server does not tell them.
NO_USAGE = "no_usage"

#: Rewards closer than this are equal: they give no GRPO advantage.
EQUAL_WITHIN = 1e-9


class UserRequest(Model):
    """One request of the app as it arrived: the JSON ``body``, unknown fields included, and ``headers`` with lower-case
    names, without secrets (``authorization``, ``x-api-key``, ``cookie``, ``x-auth-token``, ...)."""

    request_id: str = Field(min_length=1)
    body: dict[str, Any]
    model: str = ""
    headers: dict[str, str] = {}


class HookContext(Model):
    """The context of a call: ``policy_version`` is the trainer step of the serving weights (``None`` if unknown),
    ``group_id`` names the group in logs, and the call is abandoned after ``deadline_seconds``."""

    num_repeat: int = Field(ge=1)
    policy_version: int | None = None
    group_id: str = ""
    deadline_seconds: float = Field(default=30.0, gt=0)


class Submission(Model):
    """The N request bodies to sample and the task they belong to."""

    task: Task
    requests: list[dict[str, Any]] = Field(min_length=1)


class PassThrough(Model):
    """Answer this request once, and train nothing of it; ``name``: under which such requests are counted."""

    name: str = Field(default="hook", pattern=RULE_NAME)


class Feedback(Model):
    """The user's feedback on one answer or one session.

    ``rating`` is explicit, from -1 (bad) to 1 (good), if any; ``better`` is what the user would have wanted to read.
    ``signals`` are observations by name (``copied``, ``regenerated``, ``edited``, ``repeated``, ``abandoned``, ...),
    each in [0, 1]: how surely or how much it happened. An absent signal was not observed, which is not the same as 0.
    """

    rating: float | None = Field(default=None, ge=-1, le=1, allow_inf_nan=False)
    comment: str = ""
    better: str = ""
    signals: dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]] = {}


class Turn(Model):
    """One request of a session and its delivered answer: the body as the app sent it, the OpenAI message, the reward of
    the reward hook (``None`` if the group was not scored), and the sub-agent that asked (empty: the main one)."""

    completion_id: str = Field(min_length=1)
    request: dict[str, Any]
    message: dict[str, Any]
    reward: FiniteFloat | None = None
    feedback: Feedback | None = None
    agent: str = ""


class Session(Model):
    """The turns of one conversation, oldest first; ``feedback`` is about the whole conversation."""

    session_id: str = Field(min_length=1)
    turns: list[Turn]
    feedback: Feedback | None = None


class Candidate(Model):
    """One sampled answer.

    ``message`` is the OpenAI message of the choice, ``text`` its text content ("" if there is none). ``tool_calls`` are
    as the model wrote them, see :attr:`malformed_calls`. Token counts are the engine's; ``latency_seconds`` is from the
    request to the last byte. ``request`` is the body from which the answer was sampled (empty if unknown). ``logprobs``
    is the choice's object in OpenAI's form if ``request`` asked for it. ``session`` holds the turns before this one, if
    there is a session. Only an answer that was delivered, or that somebody judged, can have ``feedback``.
    ``source`` is ``incumbent`` for the answer that the user got of an incumbent (see Takeover): it is judged and never
    trained.
    """

    index: int = Field(ge=0)
    message: dict[str, Any]
    text: str = ""
    tool_calls: list[dict[str, Any]] = []
    finish_reason: str = "stop"
    completion_tokens: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    latency_seconds: float = Field(default=0.0, ge=0)
    policy_version: int | None = None
    request: dict[str, Any] = {}
    logprobs: dict[str, Any] | None = None
    session: Session | None = None
    feedback: Feedback | None = None
    source: Literal["policy", "incumbent"] = "policy"

    @property
    def malformed_calls(self) -> list[dict[str, Any]]:
        """The tool calls whose arguments are no JSON object: no client can run them."""
        return malformed_calls(self.tool_calls)


def malformed_calls(tool_calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``tool_calls``, in OpenAI's form, whose arguments are no JSON object; none at all count as an empty
    one."""
    return [call for call in tool_calls if not _is_object((call.get("function") or {}).get("arguments") or "{}")]


def _is_object(arguments: object) -> bool:
    try:
        return isinstance(json.loads(arguments), dict) if isinstance(arguments, str) else isinstance(arguments, dict)
    except (ValueError, RecursionError):
        return False


class Reward(Model):
    """The reward of one candidate; ``components`` are logged as metrics, ``reason`` is for people."""

    value: RewardNumber
    components: dict[str, FiniteFloat] = {}
    reason: str = ""


class GroupScore(Model):
    """The validated rewards of one group, in the order of its candidates."""

    rewards: list[Reward] = Field(min_length=1)

    @property
    def values(self) -> list[float]:
        """The bare numbers."""
        return [reward.value for reward in self.rewards]

    @property
    def mean(self) -> float:
        """Mean reward of the group."""
        return sum(self.values) / len(self.rewards)

    @property
    def informative(self) -> bool:
        """Whether the rewards differ; a group of equal rewards teaches nothing."""
        return max(self.values) - min(self.values) > EQUAL_WITHIN


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts that make the content of a message, in OpenAI's form: the string, or the text parts of the list."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def sendable(text: str) -> str:
    """``text`` of a hook with lone surrogates, which no answer, log or body can say, spelled as Python escapes them."""
    return text.encode("utf-8", "backslashreplace").decode()


SubmitResult = list[dict[str, Any]] | Submission | PassThrough
RewardResult = list[float | Reward] | list[float] | list[Reward]
SubmitHook = Callable[[UserRequest, HookContext], SubmitResult | Awaitable[SubmitResult]]
RewardHook = Callable[[Task, list[Candidate], HookContext], RewardResult | Awaitable[RewardResult]]
OutcomeResult = float | Reward | RewardResult | None
SessionHook = Callable[[Session, HookContext], OutcomeResult | Awaitable[OutcomeResult]]


class Rule(ABC):
    """Scores answers one by one, each in [0, 1]; an instance is itself an ``on_compute_relative_reward``."""

    @abstractmethod
    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """The reward of one answer.

        Raises:
            HookError: the task or the request lacks what the rule needs.
        """

    def on_compute_relative_reward(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        """The reward of each answer."""
        return [self.judge(task, candidate) for candidate in candidates]

    def __call__(self, task: Task, candidates: list[Candidate], context: HookContext) -> list[Reward]:
        return self.on_compute_relative_reward(task, candidates, context)


@dataclass(frozen=True)
class Hooks:
    """The functions of a set of hooks.

    Attributes:
        source: where they came from.
        parts: the hooks that they call.
        code: a digest of the files that loading them ran; empty where nobody knows.
    """

    reward: RewardHook
    submit: SubmitHook | None = None
    source: str = "hooks"
    session_end: SessionHook | None = None
    parts: tuple[Hooks, ...] = ()
    code: str = ""


class ResultError(ValueError):
    """What a hook returned is not what it must return; the message quotes nothing of it but types and numbers."""


def default_task(request: UserRequest) -> Task:
    """The task of a request without a submit hook: its id is the request id, its query the user's last message."""
    listed: Any = request.body.get("messages")
    listed = cast("list[Any]", listed) if isinstance(listed, list) else []
    messages = [cast("dict[str, Any]", entry) for entry in listed if isinstance(entry, dict)]
    prompt: Any = request.body.get("prompt")
    if not messages and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    asked = ["\n".join(texts_of(entry)) for entry in messages if entry.get("role") == "user"]
    return Task(task_id=request.request_id, main_query=asked[-1] if asked else "", init_messages=messages)


def checked_submission(result: object, request: UserRequest, context: HookContext) -> Submission | PassThrough:
    """What :data:`SUBMIT` returned for ``request``.

    Raises:
        ResultError: it is not what the hook must return.
    """
    if isinstance(result, PassThrough):
        return result
    if isinstance(result, Submission):
        task, listed = result.task, cast("list[Any]", result.requests)
    elif isinstance(result, list | tuple):
        task, listed = default_task(request), list(cast("Sequence[Any]", result))
    else:
        raise ResultError(
            f"returned a {type(result).__name__}; return a list of request bodies, a Submission or a PassThrough"
        )
    if len(listed) != context.num_repeat:
        raise ResultError(f"returned {len(listed)} requests; return {context.num_repeat} (context.num_repeat)")
    # usually the same body N times
    for index, body in {id(body): (index, body) for index, body in enumerate(listed)}.values():
        if not isinstance(body, dict):
            raise ResultError(f"returned a {type(body).__name__} as request {index}; return JSON objects")
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise ResultError(f"returned request {index} that is not JSON: {exc}") from exc
    return Submission(task=task, requests=listed)


def checked_rewards(result: object, count: int, of: str) -> list[Reward]:
    """The ``count`` rewards that a hook returned ``of`` as many candidates or turns; errors as above."""
    if not isinstance(result, list | tuple):
        raise ResultError(f"returned a {type(result).__name__}; return a list with one reward per {of[:-1]}")
    values = list(cast("Sequence[object]", result))
    if len(values) != count:
        raise ResultError(f"returned {len(values)} rewards for {count} {of}")
    return [_checked_reward(value, index) for index, value in enumerate(values)]


def checked_outcome(result: object, turns: int) -> Reward | list[Reward] | None:
    """What :data:`SESSION_END` returned of a session with ``turns``; errors as above."""
    if result is None or isinstance(result, list | tuple):
        return None if result is None else checked_rewards(cast("Sequence[object]", result), turns, "turns")
    return _checked_reward(result, 0)


def _checked_reward(value: object, index: int) -> Reward:
    number = value.value if isinstance(value, Reward) else value
    if not isinstance(number, Real):
        raise ResultError(f"returned a {type(number).__name__} as reward {index}; return a number or a Reward")
    if not abs(float(number)) <= MOST_REWARD:
        limit = f"go up to {MOST_REWARD:g}" if isfinite(number) else "must be finite"
        raise ResultError(f"returned {float(number):g} as reward {index}; rewards {limit}")
    # validated again: model_construct and subclasses can hold anything
    return Reward.model_validate(value.model_dump() if isinstance(value, Reward) else {"value": float(number)})
