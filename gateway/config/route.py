"""``RouteSettings``: how the requests for one model are answered, and what trains on them; and the rules of
``pass_through`` that are shipped for coding agents.

Invariant: every wait that a request can meet has its bound here; times are seconds. A shipped rule fits only requests
whose answer no later turn reads: titles, labels, and checks of whether the model answers. What compacts a conversation
is none of them: the next turns build on it.
"""

from __future__ import annotations

import re
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from gateway.config.takeover import ServeConfig
from gateway.data.consent import ConsentRule, PrivacyRules, Redaction
from reward_hooks.contract import RULE_NAME
from swarm.client.wire import parse_server_token, parse_server_url, parse_token
from swarm.errors import ConfigError
from swarm.packs import required
from swarm.types import Model
from swarm.validation import BaseUrl

PolicyKind = Literal["best", "first"]
WhenBatchWaits = Literal["best", "single"]
Baseline = Literal["std", "mean", "none"]

_Ratio: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def _rising(steps: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if any(later <= earlier for (earlier, _), (later, _) in pairwise(steps)):
        raise ValueError("a schedule is a list of [step, share] with rising steps")
    return steps


#: A part of each batch, or parts from training steps on: ``[[0, 0.8], [100, 0.4]]``.
Share: TypeAlias = (
    _Ratio
    | Annotated[tuple[tuple[Annotated[int, Field(ge=0)], _Ratio], ...], Field(min_length=1), AfterValidator(_rising)]
)


def _as_sent(secret: object) -> object:
    """Without the line's end of a file of secrets, which no header has."""
    return secret.strip() if isinstance(secret, str) else secret


Secret: TypeAlias = Annotated[SecretStr, BeforeValidator(_as_sent)]


class UpstreamConfig(Model):
    """An OpenAI-compatible server that answers without training anything."""

    base_url: BaseUrl = Field(description="ends with /v1 as in the OpenAI SDK")
    api_key: Secret = Field(default=SecretStr(""), description="its key")
    model: str | None = Field(default=None, description="model name sent there; default: the one asked for")


class PassRule(Model):
    """Fits a request for which every condition that is given holds.

    Patterns are regular expressions that are searched for; ``^`` is the start of the text.
    """

    name: str = Field(pattern=RULE_NAME, description="under which the requests are counted")
    path: str | None = Field(default=None, pattern=r"^/v1/", description="such as /v1/chat/completions")
    headers: dict[str, re.Pattern[str]] = Field(
        default={}, description="by name; headers that may hold secrets or names of sessions are not seen"
    )
    system: re.Pattern[str] | None = Field(default=None, description="in the instructions before the first turn")
    tools: bool | None = Field(default=None, description="whether the request has tools")
    max_tokens: int | None = Field(default=None, ge=1, description="asks for no more tokens than that")
    max_prompt_chars: int | None = Field(default=None, ge=1, description="its texts are no longer than that together")

    @field_validator("headers")
    @classmethod
    def _lower(cls, patterns: dict[str, re.Pattern[str]]) -> dict[str, re.Pattern[str]]:
        return {name.lower(): pattern for name, pattern in patterns.items()}

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if all(value is None or value == {} for key, value in self if key != "name"):
            raise ValueError(f"the rule {self.name!r} has no condition, so every request would pass")
        return self


#: Stands for :data:`SHIPPED` in a configuration.
AGENTS = "agents"
_SHIPPED: list[dict[str, Any]] = [
    # Claude Code: a title for each prompt of a session, and whether a key and a model answer at all
    {
        "name": "claude-title",
        "headers": {"user-agent": "^claude-cli/"},
        # of 2.1.330, and of 2.1.197
        "system": "(?m)^(You are naming a coding session|Generate a concise, sentence-case title)",
        "tools": False,
    },
    {
        "name": "claude-check",
        "headers": {"user-agent": "^claude-cli/"},
        "max_tokens": 1,
        "max_prompt_chars": 20,
        "tools": False,
    },
    # Codex says itself what a thread is for
    {"name": "codex-title", "headers": {"x-codex-turn-metadata": '"thread_source": ?"thread_title"'}},
    {
        "name": "opencode-title",
        "headers": {"user-agent": "^opencode/"},
        "system": "^You are a title generator",
        "tools": False,
    },
]
SHIPPED = [PassRule.model_validate(rule) for rule in _SHIPPED]

#: Lines that differ from one conversation to the next: the first one of Claude Code has a hash of the conversation.
_VOLATILE_LINES = ["x-anthropic-billing-header:.*"]
_REFUSALS = [
    r"(?i)(sorry|i apologi[sz]e|(i['\u2019]m|i am) (very |so |really )?sorry),? (but |that )?(i|as)\b",
    r"(?i)(unfortunately, )?i (can['\u2019]t|cannot|can not|won['\u2019]t) (help|assist|provide|comply|fulfil|engage)",
    r"(?i)(unfortunately, )?(i['\u2019]m|i am) (unable|not able|not allowed) to\b",
    r"(?i)as an? (ai|language model)\b",
]


class DataConfig(Model):
    """What is kept of a route's requests and trained on, see :doc:`privacy`."""

    consent: ConsentRule = Field(
        default="opt_out",
        description="opt_out: all is trained but what says no, by the header x-swarm-train: false or by its key; "
        "opt_in: nothing is trained or kept unless the header says true or the key --train",
    )
    redact: Redaction = Field(
        default="none",
        description="group: what holds an e-mail or IP address, a phone, a card, an IBAN, a key or a token, in its "
        "prompt or any of its answers, is answered as ever and neither kept nor trained; before_sampling: in prompts "
        "placeholders stand for these, and are sampled, judged, kept and trained; the user gets the values back",
    )

    patterns: dict[Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,39}$")], re.Pattern[str]] = Field(
        default={},
        description="more that is private, by the name of its kind: regular expressions that are searched for",
    )
    finders: list[str] = Field(
        default=[],
        description="more that finds it: 'module:function', which gives kind, start and end of each private part of a "
        "text, or 'presidio', if it is installed; a text at which one fails is private as a whole",
    )

    @model_validator(mode="after")
    def _can_be_loaded(self) -> Self:
        if self.rules is None and (self.patterns or self.finders):
            raise ValueError("patterns and finders need redact: group or redact: before_sampling")
        return self

    @cached_property
    def rules(self) -> PrivacyRules | None:
        """What is private here; ``None``: nothing."""
        if self.redact == "none":
            return None
        for needed in ("masked", "filled"):
            required(needed, "data.redact")
        return required("redaction", "data.redact")(self.patterns, self.finders)


class RouteSettings(Model):
    """How one route answers: through a swarm server, a plain upstream, or the first with the second behind it."""

    swarm_url: str | None = Field(
        default="http://127.0.0.1:10086", pattern=r"^https?://", description="the swarm server; null: none"
    )
    swarm_token: Secret = Field(
        default=SecretStr(""),
        description="its token, with the scope claim; default: SWARM_TOKEN of the environment, else that in swarm_url",
    )
    upstream: UpstreamConfig | None = Field(
        default=None,
        description="answers, untrained, when the swarm cannot; with swarm_url: null it answers everything",
    )
    serve: ServeConfig | None = Field(
        default=None,
        description="an incumbent answers the users, and what trains here learns behind it, see Takeover; default: "
        "what trains answers them",
    )
    hooks: str | None = Field(
        default=None,
        min_length=1,
        description="folder of hook files, blend (.yaml), 'module:attribute', or name; required with a swarm",
    )
    num_repeat: int | None = Field(
        default=None,
        ge=1,
        description="episodes per request; default: the job's; groups of another size are not trained",
    )
    control: Literal["none", "shuffle"] = Field(
        default="none", description="shuffle: submit each group's rewards permuted, a control run that must not learn"
    )
    train_fraction: float = Field(
        default=1.0, ge=0, le=1, description="share of requests that fan out and train; the rest goes straight through"
    )
    pass_through: list[PassRule] = Field(
        default_factory=lambda: list(SHIPPED),
        description="requests that one of these rules fits are answered once and not trained; 'agents' stands for "
        "those that are shipped, for titles and the like of coding agents",
    )
    drop_lines: list[re.Pattern[str]] = Field(
        default_factory=lambda: [re.compile(line) for line in _VOLATILE_LINES],
        description="lines at the head of the instructions that one of these patterns fits as a whole are left out "
        "before sampling: what differs with each conversation there keeps vLLM from reusing the prompt of another; "
        "default: Claude Code's billing line; []: none",
    )

    refusal_openings: list[re.Pattern[str]] = Field(
        default_factory=lambda: [re.compile(opening) for opening in _REFUSALS],
        description="an answer whose text begins with one of these patterns counts as refused, for the watch and the "
        "gate; default: the usual ones in English; []: none",
    )
    data: DataConfig = Field(default=DataConfig(), description="consent of those who send requests, and redaction")

    share: Share | None = Field(
        default=None,
        description="part of each batch that this route may fill while others train too, or a schedule "
        "[[step, share], ...]; requests beyond it are answered at once and untrained. Routes of one name are one app, "
        "over all gateways",
    )
    key_shares: dict[str, Share] = Field(
        default={}, description="the same for single keys of the route, by their label: each is an app of its own"
    )

    policy: PolicyKind = Field(
        default="best", description="best: judge, then answer; first: answer 0 streams live, all are judged behind"
    )
    quorum: int | None = Field(
        default=None, ge=1, description="policy best: judge as soon as so many answers are there; default: all"
    )
    answer_deadline_seconds: float | None = Field(
        default=None, gt=0, description="policy best: judge the answers there are by then (at least one)"
    )
    when_batch_waits: WhenBatchWaits = Field(
        default="best",
        description="policy best: what a request gets while no group of it can be trained, because the batch is full, "
        "the share is used up, the trainer is away or all steps are done; best: the best of a group that is not "
        "trained; single: one answer, which no hook judges",
    )
    untrained_repeat: int | None = Field(
        default=None, ge=2, description="answers of such a group, to sample fewer; default and most: as if it trained"
    )
    stragglers: Literal["cancel", "finish"] = Field(
        default="finish",
        description="answers still being sampled when the group is decided; finish: in the background, and all train",
    )
    acknowledge_seconds: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="policy best: how long an answer waits for its group to be acknowledged, so that x-swarm-trained "
        "says true or false instead of pending",
    )
    on_disconnect: Literal["cancel", "finish"] = Field(
        default="cancel", description="what becomes of the group when the user hangs up"
    )

    claim_wait_seconds: float = Field(default=120.0, gt=0, description="longest wait for episodes, e.g. while syncing")
    offline_wait_seconds: float = Field(
        default=10.0,
        ge=0,
        description="longest wait while the swarm server is down, its engine OFFLINE, or, with an upstream, BOOTING",
    )
    sample_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="deadline of all samples of a request; of an upstream, also an incumbent, until its plain answer "
        "is whole or its stream begins, and between two parts of a stream",
    )
    hook_timeout_seconds: float = Field(default=60.0, gt=0, description="deadline of each hook call")
    submit_timeout_seconds: float = Field(
        default=60.0, gt=0, description="how long the rewards of a group are offered again before they are given up"
    )
    max_in_flight: int = Field(default=256, ge=1, description="requests of this route served at once")
    max_queued: int = Field(default=256, ge=0, description="requests that wait for a place; more are answered 429")
    queue_seconds: float = Field(default=30.0, gt=0, description="longest wait for a place, then 429")

    feedback_window_seconds: float = Field(
        default=0.0, ge=0, description="how long a group stays open for the user's feedback before it is submitted"
    )
    session_window_seconds: float = Field(
        default=1200.0,
        ge=0,
        description="with a hook on_session_end: how long a group stays open at most for the end of its session",
    )
    session_idle_seconds: float | None = Field(
        default=None,
        gt=0,
        description="a conversation without a new turn for so long is over; default: 300 with a hook on_session_end, "
        "else 1800. With the hook it must be less than session_window_seconds: a conversation that lasts longer than "
        "the difference is credited in part. Without the hook it is feedback_window_seconds where that is more",
    )
    session_weight: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="of what a session earns, beside the reward of each answer"
    )
    session_discount: float = Field(
        default=0.95, ge=0, le=1, description="share of a session's outcome that one turn before the last gets"
    )
    session_baseline: Baseline = Field(
        default="std",
        description="what an outcome is compared with: the mean of the last sessions of the same task, over their "
        "standard deviation (std) or not (mean), or nothing (none)",
    )

    @field_validator("pass_through", mode="before")
    @classmethod
    def _shipped_rules(cls, rules: Any) -> Any:
        if not isinstance(rules, list):
            return rules
        return [rule for entry in cast("list[Any]", rules) for rule in (SHIPPED if entry == AGENTS else [entry])]

    @model_validator(mode="before")
    @classmethod
    def _token_out_of_the_address(cls, data: Any) -> Any:
        """Move the token of ``http://x:TOKEN@host`` to ``swarm_token``, unless that is given: errors quote the address,
        and a reader of one would have the token."""
        address = data.get("swarm_url") if isinstance(data, dict) else None
        if not isinstance(address, str) or (token := parse_server_token(address)) is None:
            return data
        parts = urlsplit(address)
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return {**data, "swarm_url": bare, "swarm_token": data.get("swarm_token") or token}

    @model_validator(mode="after")
    def _reaches_a_server(self) -> Self:
        try:
            # what a client would refuse in the middle of a reload
            parse_token(self.swarm_token.get_secret_value())
            if self.swarm_url is not None:
                parse_server_url(self.swarm_url)
        except ConfigError as exc:
            raise ValueError(exc.message) from exc
        return self

    @model_validator(mode="after")
    def _answers_somehow(self) -> Self:
        self.check_answers()
        return self

    def check_answers(self) -> None:
        """Raise :class:`ValueError` unless something answers the route's requests, and judges what is to train."""
        if self.serve is not None and self.swarm_url is None:
            raise ValueError("serve needs a swarm server (swarm_url): nobody would learn behind the incumbent")
        if self.swarm_url is None and self.upstream is None:
            raise ValueError("set swarm_url, upstream or both: nothing would answer")
        if self.swarm_url is not None and self.hooks is None:
            raise ValueError("hooks is required with a swarm server (or set swarm_url: null to only pass requests on)")
        if self.serve is None:
            return
        if self.upstream is not None:
            raise ValueError("serve and upstream exclude each other: the incumbent answers every request")
        if self.train_fraction != 1.0:
            raise ValueError("with serve, shadow_fraction says which requests train: leave train_fraction out")
        if self.serve.gate.trial_every is not None and self.num_repeat == 1:
            raise ValueError(
                "num_repeat is 1, so nothing is trained or compared here, and each trial would wait in vain: leave out "
                "num_repeat or gate.trial_every"
            )
        if self.serve.gate.trial_every is not None and self.when_batch_waits != "best":
            raise ValueError(
                "with gate.trial_every a batch waits for the verdict on groups that are not trained: leave "
                "when_batch_waits at best"
            )
        if self.feedback_window_seconds:
            raise ValueError("with serve, users rate the incumbent's answers: leave feedback_window_seconds out")
