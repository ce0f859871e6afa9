"""What the watch over a training run looks for, how far each thing may go, and what happens beyond.

The limits of ``weights``, ``sample_size``, ``sampler_kl`` and ``chi2`` are those of verl's own health check (its
documentation, ``docs/algo/rollout_corr.md``); the others are choices, which the documentation of the watch explains.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, FiniteFloat, ValidationInfo, field_validator

from swarm.job import switch
from swarm.types import Model

Action: TypeAlias = Annotated[Literal["off", "warn", "pause", "rollback"], BeforeValidator(switch)]


class Watched(Model):
    """One thing that is watched."""

    limit: FiniteFloat = Field(ge=0, description="as the thing itself says; default: see there")
    action: Action = Field(
        default="warn",
        description="beyond the limit. off: nothing; warn: the alarm is raised; pause: training also waits for a "
        "person (`swarm-gateway policies resume`); rollback: also each challenger that answers users goes back to the "
        "shadow, unless it is pinned",
    )


class WatchRules(Model):
    """What is watched, by the names of the alarms; a mean is over `window` steps, or fewer."""

    window: int = Field(
        default=10, ge=2, le=100, description="steps of a mean; for a large difference half of them or a third will do"
    )
    entropy: Watched = Field(
        default=Watched(limit=0.5),
        description="mean entropy, as a share of what it was when the mean reward was first as high as now: less",
    )
    reward: Watched = Field(
        default=Watched(limit=0.5),
        description="fall of the mean reward from its best, in standard deviations of the rewards: more",
    )
    held_out: Watched = Field(
        default=Watched(limit=0.05),
        description="fall of the mean reward of evaluations, of two in a row at least, from the best, as a share of "
        "it: more",
    )
    components: Watched = Field(
        default=Watched(limit=0.2),
        description="fall of the mean of a component of the reward (or another logged value that lies in [0, 1]) from "
        "its best, while the mean reward rose: more",
    )
    lower_is_better: tuple[str, ...] = Field(
        default=("refused", "faults", "banned_count", "losses", "contradicted", "spread", "place_swing"),
        description="components that may fall, by the last part of their names",
    )
    length: Watched = Field(
        default=Watched(limit=2.0), description="mean tokens of an episode, as a multiple of those at first: more"
    )
    repetition: Watched = Field(
        default=Watched(limit=0.2),
        description="rise of the share of an answer's last four-token sequences that it has said before: more",
    )
    refusals: Watched = Field(
        default=Watched(limit=0.1), description="rise of the share of answers that refuse, since the first: more"
    )
    signal: Watched = Field(
        default=Watched(limit=0.1),
        description="share of the groups of two steps in a row whose rewards differ or that have a credit: less",
    )
    weights: Watched = Field(
        default=Watched(limit=2.0),
        description="mean weight of a step's tokens, trainer over sampler, each of which verl cuts at 2: less than "
        "one over it, or more",
    )
    sample_size: Watched = Field(
        default=Watched(limit=0.3), description="effective sample size of a step, as a share of its tokens: less"
    )
    sampler_kl: Watched = Field(
        default=Watched(limit=0.1), description="KL divergence of a step's sampler from the trainer, its size: more"
    )
    chi2: Watched = Field(default=Watched(limit=1.0), description="the same as a chi-squared divergence: more")
    base_kl: Watched = Field(
        default=Watched(limit=0.5),
        description="KL divergence from the first weights, of a token; measured where job.kl_coef is not 0: more",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _by_default(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].default
        return {**dict(default), **value} if isinstance(default, Watched) and isinstance(value, dict) else value

    def of(self, name: str) -> Watched:
        """What is said of alarms of that name."""
        return getattr(self, name)


#: the names that alarms can have
ALARMS = tuple(name for name, field in WatchRules.model_fields.items() if isinstance(field.default, Watched))


class Alarm(Model):
    """Something that is watched is beyond its limit."""

    kind: str = Field(description="the name of the setting in `swarm.watch` that it is about")
    text: str = Field(description="a sentence with the figures")
    since: int = Field(description="the step, or the evaluated version, from which on it has been so")
    action: Action
    pauses: bool = Field(default=False, description="training waits because of it, until a person lets it go on")

    @property
    def sentence(self) -> str:
        """All of it."""
        waits = "; training waits: `swarm-gateway policies resume --reason WHY`" if self.pauses else ""
        return f"{self.kind}, since step {self.since}: {self.text}{waits}"
