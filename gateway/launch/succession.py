"""Who answers one route under ``up``, and who is on the way to succeed it.

Invariant: at most one challenger at a time is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.config.takeover import name_of_version
from gateway.launch.children import Child
from gateway.launch.plan import SuccessionPlan
from gateway.launch.servers import LastingProcess
from gateway.launch.successors import Successor
from swarm.evidence.stages import ServingStage

#: Stands for the incumbent of the user's file among versions.
OF_THE_FILE = 0


@dataclass(eq=False)
class ServedModel:
    """A vLLM that answers ``routes``; it is stopped at ``ends``, once it answers none."""

    process: LastingProcess
    routes: set[str]
    ends: float | None = None


@dataclass(eq=False)
class RouteSuccession:
    """Of one route: at most one challenger at a time is on its way to be the next incumbent.

    Attributes:
        stage_of: the incumbent of now, as stages name it.
        version: that the incumbent is; 0: none.
        next: on its way.
        writing: makes its folder.
        booting: its vLLM.
        taking: its vLLM, once the gateway was told of it, at ``told_at``; ``None``: that is not one of ours.
        awaited: the incumbent that the gateway is to follow by then, as stages name it; empty: the one that it follows.
        refused: versions that did not get there; :data:`OF_THE_FILE` is that of the file.
        recalling: its version gives its place back to the incumbent of the file.
        ending: folders whose last answers may go on until then; ``inf``: until the gateway follows, and then some.
        warns_at: when it is said that the job's engine does not answer with ``next`` yet.
        refusals: how often that engine said so.
    """

    plan: SuccessionPlan
    stage_of: str
    version: int = 0
    next: Successor | None = None
    writing: Child | None = None
    booting: LastingProcess | None = None
    taking: ServedModel | None = None
    told_at: float = 0.0
    awaited: str = ""
    recalling: bool = False
    looked_at: float = 0.0
    warns_at: float = 0.0
    refusals: int = 0
    refused: set[int] = field(default_factory=set[int])
    ending: dict[Path, float] = field(default_factory=dict[Path, float])

    @property
    def label(self) -> str:
        """Who is on its way."""
        return self.plan.first if self.next is None else f"version {self.next.version} of {self.plan.name}"

    def among(self, stages: Sequence[ServingStage]) -> dict[str, ServingStage]:
        """The stages of its route, by their incumbents."""
        return {stage.incumbent: stage for stage in stages if stage.route == self.plan.route}

    def follows(self, successor: Successor | None) -> None:
        """The incumbent is ``successor`` from now on, by the name that it has; ``None``: that of the file."""
        self.version = OF_THE_FILE if successor is None else successor.version
        self.stage_of = self.plan.first if successor is None else name_of_version(successor.name, successor.version)

    def drop_ended(self, now: float) -> bool:
        """Whether there were folders whose last answers have had their time by ``now``."""
        before = len(self.ending)
        self.ending = {folder: ends for folder, ends in self.ending.items() if ends > now}
        return len(self.ending) < before
