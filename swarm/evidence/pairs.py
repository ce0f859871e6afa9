"""``Pair``: what incumbent and challenger did with one request; the terms under which pairs are comparable; and how the
gate decides.

Invariant: pairs of different terms are never pooled. A reward in a pair is in [0, 1], or ``None`` because nobody
judged.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, FiniteFloat, model_validator

from swarm.types import TolerantModel

MAX_GROUP_ID, MAX_NAME, MAX_SUITES = 256, 1000, 100
#: By so much of their distance a reward may lie beyond the bounds, as 0.1 + 0.2 lies beyond 0.3.
_ROUNDING = 1e-9
_Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
SuiteName: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_Count: TypeAlias = Annotated[int, Field(ge=0)]
Side: TypeAlias = Literal["challenger", "incumbent"]


class GateRules(TolerantModel):
    """When a challenger may take the incumbent's place, and when it is stopped."""

    bounds: tuple[FiniteFloat, FiniteFloat] = Field(
        default=(0.0, 1.0), description="of the hook's rewards; a reward beyond them counts as not judged"
    )
    reference: bool = Field(
        default=True,
        description="the incumbent's answer is one more candidate of the group's reward hook; false: it is judged in a "
        "call of its own, so that rewards of the group do not depend on it: not for hooks that rank or compare answers",
    )
    margin: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="how much lower a challenger's mean reward may be and still count as not worse",
    )
    better: bool = Field(default=False, description="a challenger must be proven better, not only not worse")
    alpha: float = Field(
        default=0.05, gt=0, lt=0.5, description="chance of an error of each kind: a false alarm, a wrong promotion"
    )
    max_unjudged: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="share of requests that may lack a judgement before a challenger is held back",
    )
    max_errors: float = Field(
        default=0.02, ge=0, lt=1, description="guard: by so much the challenger's share of failed answers may be larger"
    )
    max_refusals: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="guard: the same for answers that refuse, by `refusal`, content_filter or the route's "
        "`refusal_openings`",
    )
    max_length: float | None = Field(
        default=2.0,
        gt=1,
        allow_inf_nan=False,
        description="guard: so many times the characters of the incumbent's answer; null: none",
    )
    max_p95_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="guard: the time within which at least 95 % of the challenger's groups have all their answers; "
        "null: none",
    )
    max_rating_drop: float = Field(
        default=0.2,
        ge=0,
        lt=2,
        description="guard: by so much users may rate the challenger's answers lower, on the scale from -1 to 1",
    )

    @model_validator(mode="after")
    def _bounds_are_apart(self) -> Self:
        if self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"bounds: the lower one is not below the upper one: {list(self.bounds)}")
        return self

    def scaled(self, reward: float) -> float | None:
        """A reward of the hook as one in [0, 1]; ``None`` for one beyond the bounds."""
        low, high = self.bounds
        share = (reward - low) / (high - low)
        return min(1.0, max(0.0, share)) if -_ROUNDING <= share <= 1 + _ROUNDING else None


class Terms(TolerantModel):
    """What is compared, and how; another value of any field begins a new comparison.

    Attributes:
        route: of the gateway.
        incumbent: its name.
        model: of the challenger.
        challenger: the policy version that answered; ``None``: not known.
        hook: where the judge comes from.
        code: digest of its files.
        num_repeat: answers of the challenger.
        rules: of the gate.
        stage: in which it answers, see :attr:`swarm.evidence.stages.ServingStage.label`.
        share: of the conversations that begin, meant for the challenger.
        suites: those that are protected, each of which must be not worse by itself: `name@digest of its prompts`.
    """

    route: _Name = ""
    incumbent: _Name = ""
    model: _Name = ""
    challenger: int | None = None
    hook: _Name = ""
    code: _Name = ""
    num_repeat: int = Field(default=1, ge=1)
    rules: GateRules = GateRules()
    stage: _Name = "shadow"
    share: _Share = 0.0
    suites: tuple[SuiteName, ...] = Field(default=(), max_length=MAX_SUITES)

    @property
    def digest(self) -> str:
        """Names the comparison; the order of suites is irrelevant."""
        ordered = self.model_copy(update={"suites": tuple(sorted(set(self.suites)))})
        return sha256(ordered.model_dump_json().encode()).hexdigest()[:16]


class SideResult(TolerantModel):
    """What one side did with one request: means over its answers.

    Attributes:
        answers: how many it gave, failed ones included.
        reward: of those that did not fail.
        failed, refused: shares of them.
        slowest_seconds: of the slowest answer, from the request to the last byte.
        characters: of the texts and of the arguments of calls.
        tokens: as the server counts them, each with its own tokenizer; ``None``: it does not say.
        finish: the finish reasons, each once, in alphabetical order.
    """

    answers: int = Field(default=1, ge=0)
    reward: _Share | None = None
    failed: _Share = 0.0
    refused: _Share = 0.0
    slowest_seconds: _Amount | None = None
    characters: _Amount | None = None
    tokens: _Amount | None = None
    finish: str = Field(default="", max_length=MAX_NAME)


class Pair(TolerantModel):
    """Both sides of one request.

    Attributes:
        suite: of :attr:`Terms.suites`; empty for a live request.
        side: who answered the user.
        position: of the conversation, by its salted hash: the challenger answers below the share; ``None``: not drawn.
        begun: conversations that the gateway gave to the challenger and to the incumbent since its last pair.
        unjudged: why a reward is missing.
    """

    group_id: str = Field(min_length=1, max_length=MAX_GROUP_ID)
    terms: Terms
    suite: _Name = ""
    challenger: SideResult
    incumbent: SideResult
    side: Side = "incumbent"
    position: _Share | None = None
    begun: tuple[_Count, _Count] = (0, 0)
    unjudged: _Name = ""

    @property
    def difference(self) -> float | None:
        """Of the rewards, in [-1, 1], above zero where the challenger is better; ``None`` where one is missing."""
        ours, theirs = self.challenger.reward, self.incumbent.reward
        return ours - theirs if ours is not None and theirs is not None else None
