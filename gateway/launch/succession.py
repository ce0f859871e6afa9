"""Who answers routes under ``up`` in the place of the incumbents in the user's file, which ``incumbents.yaml`` of its
folder says, and who is on the way to succeed them.

Invariant: of a route at most one challenger at a time is on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from gateway.config.gateway import ONLY_ROUTE
from gateway.config.takeover import name_of_version
from gateway.launch.children import Child
from gateway.launch.plan import SuccessionPlan
from gateway.launch.run_folder import write_section
from gateway.launch.servers import LastingProcess
from swarm.errors import ConfigError
from swarm.evidence.stages import ServingStage

#: Stands for the incumbent of the user's file among versions.
OF_THE_FILE = 0


class Successor(BaseModel):
    """A version of the job that answers a route's users: a model folder, served under ``name`` on ``port``; without a
    port the folder of an adapter, with which the job's own engine answers."""

    model_config = ConfigDict(frozen=True)

    version: int
    name: str
    folder: Path
    port: int | None


_FILE: TypeAdapter[dict[str, Successor]] = TypeAdapter(dict[str, Successor])


def read_successors(file: Path) -> dict[str, Successor]:
    """By route, those of :func:`named_successors` whose folders are there."""
    return {route: successor for route, successor in named_successors(file).items() if successor.folder.is_dir()}


def named_successors(file: Path) -> dict[str, Successor]:
    """By route, all that the file names; none where there is no file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        successors = _FILE.validate_python(yaml.safe_load(file.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"{file} does not say who answers: move it away, and the incumbents of your file do") from exc
    # the run folder may have been moved, with both in it
    return {route: it.model_copy(update={"folder": file.parent / it.folder}) for route, it in successors.items()}


def write_successors(file: Path, successors: Mapping[str, Successor]) -> None:
    """Keep these, and no others.

    Raises:
        OSError: they cannot be written; those of before are.
    """
    # relative where it moves with the file, as it does not where another job's run folder has it
    inside = {
        route: it.model_copy(update={"folder": it.folder.relative_to(file.parent)})
        for route, it in successors.items()
        if it.folder.is_relative_to(file.parent)
    }
    write_section(file, _FILE.dump_python({**successors, **inside}, mode="json"))


def with_successors(section: dict[str, Any], successors: Mapping[str, Successor]) -> dict[str, Any]:
    """The gateway's ``section`` with the successors as incumbents, on routes that follow promotions."""

    def before(settings: dict[str, Any], route: str) -> dict[str, Any]:
        successor = successors.get(route)
        # what a route does not say is said above
        match settings.get("serve", section.get("serve")):
            case {"incumbent": {"policy": "promoted"}, **serve} if successor is not None:
                incumbent: dict[str, Any] = {"policy": successor.version}
                if successor.port is not None:
                    incumbent |= {"model": successor.name, "port": successor.port}
                return settings | {"serve": serve | {"incumbent": incumbent}}
            case _:
                return settings

    # the gateway's own check says what is wrong
    match section.get("routes"):
        case [_, *_] as routes:
            named = [before(it, str(it.get("name"))) if isinstance(it, dict) else it for it in routes]
            return section | {"routes": named}
        case _:
            return before(section, ONLY_ROUTE)


@dataclass(eq=False)
class ServedModel:
    """What answers ``routes``: a vLLM with the model in ``folder``, or the job's engine with the adapter there. Once it
    answers none, its last answers have until ``ends``."""

    folder: Path
    process: LastingProcess | None
    routes: set[str] = field(default_factory=set[str])
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
        taking: serves it, once the gateway was told of it, at ``told_at``; ``None``: nothing of ours does.
        awaited: the incumbent that the gateway is to follow by then, as stages name it; empty: the one that it follows.
        refused: versions that did not get there; :data:`OF_THE_FILE` is that of the file.
        recalling: its version gives its place back to the incumbent of the file.
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
