"""``ServeConfig``: a route whose users an incumbent answers while a challenger learns behind it.

Invariant: an incumbent that is not built is refused with a sentence. The file names the environment variable of a key,
and never holds the key.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, model_validator

from swarm.evidence.pairs import MAX_NAME, MAX_SUITES, GateRules
from swarm.evidence.stages import Shares, StageName, StageRules, TrialRules
from swarm.types import Model
from swarm.validation import BaseUrl


class IncumbentUpstream(Model):
    """An OpenAI-compatible server that answers the users."""

    base_url: BaseUrl = Field(description="ends with /v1 as in the OpenAI SDK")
    api_key_env: str = Field(default="", description="environment variable that holds its key; empty: no key")
    model: str | None = Field(default=None, description="model name sent there; default: the one asked for")


#: What an incumbent is called that is below the adapters of a job, and answered by the job's own engine.
OF_THE_JOB = "the job's model"


def name_of_version(name: str, version: int) -> str:
    """What stages call an incumbent that is a version of the job: the same wherever it is served."""
    return f"{name}, version {version}"[:MAX_NAME]


class Incumbent(Model):
    """Who answers the users: another server, a model that ``up`` serves, or the job's own engine with a kept version
    beside the newest (``policy`` alone)."""

    upstream: IncumbentUpstream | None = Field(default=None, description="another server, such as a vendor's API")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="instead: a model, as in `job.model`, such as a folder of `models export`; `up` serves it by a "
        "vLLM of its own",
    )
    policy: Literal["promoted"] | Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="promoted: once a challenger is live and proven there, it becomes the next incumbent, which `up` "
        "serves, and the newest weights challenge it; a number: the model is this version of the job, with which it is "
        "not compared; null: the incumbent stays. Without an upstream and a model (LoRA): the job's own engine answers "
        "as this version, with 0 or promoted as the model below the adapter",
    )
    port: int = Field(default=8001, ge=1, le=65535, description="of that vLLM, on 127.0.0.1")
    vllm: tuple[str, ...] = Field(
        default=(), description="more arguments for that vLLM, such as [--gpu-memory-utilization, '0.3']"
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        both = self.upstream is not None and self.model is not None
        if both or (self.is_beside and self.policy is None):
            raise ValueError(
                "an incumbent is an upstream (base_url, ...) or a model: give one of them; a kept version is a model "
                "once it is written as a folder (`swarm-gateway models export`); with job.lora `policy` alone is enough"
            )
        if self.is_beside and {"port", "vllm"} & self.model_fields_set:
            raise ValueError("port and vllm are of the vLLM of a model: the job's own engine answers as this incumbent")
        if self.policy == 0 and not self.is_beside:
            raise ValueError("policy: 0 is the model below a job's adapter: leave out upstream and model")
        return self

    @property
    def version(self) -> int:
        """Of the job, that the incumbent is; 0: none of them."""
        return self.policy if isinstance(self.policy, int) else 0

    @property
    def is_beside(self) -> bool:
        """Whether the job's own engine answers as it, beside the newest version."""
        return self.upstream is None and self.model is None

    @property
    def server(self) -> IncumbentUpstream:
        """Where it answers; the address of one that :attr:`is_beside` is below that of the swarm server."""
        if self.is_beside:
            return IncumbentUpstream(base_url=f"http://swarm/kept/{self.version}/v1", model=OF_THE_JOB)
        return self.upstream or IncumbentUpstream(base_url=f"http://127.0.0.1:{self.port}/v1", model=self.model)


class GateConfig(TrialRules, GateRules):
    """How challenger and incumbent are compared, and who moves the stage."""

    model_config = ConfigDict(extra="forbid")

    hook: str | None = Field(
        default=None,
        description="judges both for the verdict, and trains nobody: as a route's `hooks`, of which only the reward "
        "counts; default: the hook that trains",
    )
    suites: dict[Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")], str] = Field(
        default={},
        max_length=MAX_SUITES,
        description="by name, files of held-out prompts, as `replay` reads them: in a trial both sides answer prompts "
        "drawn from each, and nobody is promoted unless the challenger is proven not worse on each by itself",
    )


class CanaryConfig(Model):
    """A share of the conversations gets the challenger's answers."""

    shares: Shares = Field(default=(0.05, 0.25), description="of the conversations that begin, one after another")
    sticky: Literal["session", "key", "request"] = Field(
        default="session",
        description="what keeps its side: a conversation, all that a key sends, or nothing",
    )


class ServeConfig(Model):
    """An incumbent answers the route's users, and a challenger learns from their requests."""

    incumbent: Incumbent = Field(description="who answers")
    stage: StageName = Field(
        default="shadow",
        description="where a comparison begins; from then on the swarm server has the stage. shadow: the incumbent "
        "answers everybody, the challenger nobody; canary: the challenger a share; live: the challenger everybody",
    )
    canary: CanaryConfig = Field(default=CanaryConfig(), description="whom the challenger answers in the canary")
    watch_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="of the challenger's answers, so many are compared with one of the incumbent's, asked behind them",
    )
    shadow_fraction: float = Field(
        default=1.0, ge=0, le=1, description="share of requests whose group the challenger answers behind the user"
    )
    challenger_seconds: float = Field(
        default=20.0,
        gt=0,
        description="for which a user waits for the challenger, judging included; then the incumbent answers, and the "
        "challenger has failed",
    )
    max_shadows: int = Field(
        default=4, ge=1, description="such groups at once; requests beyond are answered and not compared"
    )
    gate: GateConfig = Field(default=GateConfig(), description="how both are compared")

    @property
    def incumbent_name(self) -> str:
        """Of the incumbent, in comparisons and stages."""
        upstream = self.incumbent.server
        # a name may hold a lone surrogate, which no JSON can carry
        name = (upstream.model or "the model asked for").encode(errors="replace").decode()
        if self.incumbent.is_beside and not self.incumbent.version:
            return name
        if self.incumbent.version:
            return name_of_version(name, self.incumbent.version)
        address = urlsplit(upstream.base_url).netloc.rpartition("@")[2]
        return f"{name} at {address}"[:MAX_NAME]

    @property
    def stage_rules(self) -> StageRules:
        """Where a comparison begins, and who moves it on."""
        trials = self.gate.model_dump(include=set(TrialRules.model_fields))
        return StageRules(begins=self.stage, shares=self.canary.shares, gate=self.gate_rules, **trials)

    @property
    def gate_rules(self) -> GateRules:
        """How pairs are judged."""
        return GateRules.model_validate(self.gate.model_dump())

    @model_validator(mode="after")
    def _auto_decides(self) -> Self:
        if self.gate.mode == "auto" and self.gate.trial_every is None:
            raise ValueError(
                "gate.mode is auto, so set gate.trial_every (steps): while training never waits, each step makes "
                "another challenger, and what was proven of one says nothing of the next"
            )
        if self.gate.suites and self.gate.trial_every is None:
            raise ValueError(
                "gate.suites needs gate.trial_every (steps): their prompts are asked in a trial, while training waits"
            )
        if self.gate.suites and self.incumbent.server.model is None:
            raise ValueError("gate.suites needs incumbent.upstream.model: their prompts ask for no model by name")
        if self.gate.trial_every is not None:
            for name in ("shadow_fraction", "watch_share"):
                if getattr(self, name) == 0:
                    raise ValueError(f"{name} is 0, so nothing is compared that a trial waits for: leave out either")
        return self
