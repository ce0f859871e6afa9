"""What the weights of a step were trained on, as far as a journal still knows it."""

from __future__ import annotations

from pydantic import Field

from swarm.job import TrainJob
from swarm.types import EvalResult, Model, StepResult


class Lineage(Model):
    """The steps that led to the weights of ``step``, in one training run or in one that it goes on with."""

    step: int
    job: TrainJob
    steps: list[StepResult] = Field(description="each once, as it was last done, by its number; of some runs not all")
    evaluations: list[EvalResult] = Field(description="of these weights and of those before them")
    routes: dict[str, int] = Field(description="trained episodes that the journal still has, by the gateway's route")
    others: int = Field(default=0, description="the same, of clients that name no route")
