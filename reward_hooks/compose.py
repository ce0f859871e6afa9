"""Blends: several reward hooks as one, by gate and by weight, from a YAML file.

Invariant: an answer that fails a gate never earns more than one that passes them all; if a part fails, the blend
fails, since a blend without one of its parts would be another reward.

::

    # hooks.yaml
    parts:
      - hook: json                  # a built-in or entry-point name, module:attribute, or a folder beside this file
        options: {keys: [answer]}
        gate: 1.0                   # stops answers with a lower reward
      - hook: math
        weight: 3
      - hook: ./politeness
        weight: 1
        scale: rank                 # only the order of this part counts
    otherwise: 0.0                  # the reward of answers that fail a gate

Gates run in order, each on the answers that passed the previous ones; then the weighted parts run concurrently on the
answers that passed every gate. The reward of these is the mean of the weighted parts' rewards, ``sum(w * r) / sum(w)``.
Answers that fail a gate earn ``otherwise``, or the lowest reward of the others if that is less. (Gates before quality:
the format reward of DeepSeek-R1, arXiv:2501.12948, section 2.2.2, as a precondition instead of a summand, so that form
cannot be traded for substance.)

If the weighted parts have different scales, the largest dominates. ``scale: rank`` replaces a part's rewards by their
ranks in the group, from 0 (lowest) to 1 (highest); ties get the mean of their ranks.

Fails when: all answers fail a gate. Their rewards are equal, and the group teaches nothing, not even how to pass.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from reward_hooks.contract import REWARD, SESSION_END, SUBMIT, Candidate, HookContext, Hooks, Reward
from reward_hooks.runner import HookRunner
from swarm.concurrency import all_of
from swarm.errors import ConfigError
from swarm.importer import digest_of
from swarm.types import Model, Task
from swarm.validation import path_in, read_mapping, validated


class PartConfig(Model):
    """One hook of a blend: a gate (``gate`` is set) or a weighted part."""

    hook: str = Field(min_length=1, description="name, 'module:attribute', or a path relative to the file")
    options: dict[str, Any] | None = Field(default=None, description="arguments of the class or function named")
    name: str = Field(default="", description="prefix of its components; default: the last part of hook")
    gate: FiniteFloat | None = Field(default=None, description="lowest reward that passes")
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="in the mean of the parts' rewards")
    scale: Literal["raw", "rank"] = Field(default="raw", description="rank: only the order of the answers counts")

    @model_validator(mode="after")
    def _gate_or_weight(self) -> Self:
        if self.gate is not None and {"weight", "scale"} & self.model_fields_set:
            raise ValueError("a gate has no weight and no scale: list the hook twice to use it as both")
        return self

    @property
    def label(self) -> str:
        """The prefix of its components."""
        return self.name or Path(self.hook.rpartition(":")[2]).stem.lower()


class BlendConfig(Model):
    """A blend; ``submit`` and ``session_end`` name the hooks whose other functions it uses."""

    parts: list[PartConfig] = Field(min_length=1)
    otherwise: FiniteFloat = Field(default=0.0, description="reward of answers that fail a gate")
    submit: str | None = Field(default=None, description="the hook whose on_user_submit_new_requests is used")
    session_end: str | None = Field(default=None, description="the hook whose on_session_end is used")

    @model_validator(mode="after")
    def _weighted_and_distinct(self) -> Self:
        if all(part.gate is not None for part in self.parts):
            raise ValueError("all parts are gates: give at least one part a weight")
        labels = [part.label for part in self.parts]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"parts share the name {', '.join(twice)}: set name")
        return self


class Blend:
    """Several reward hooks as one ``on_compute_relative_reward``.

    Each part has its own error boundary, the rest of the deadline, and copies of the arguments.

    Args:
        config: says what each part is, and the reward of answers that fail a gate.
        hooks: of the parts, in their order.
    """

    def __init__(self, config: BlendConfig, hooks: Sequence[Hooks]) -> None:
        parts = [(part, HookRunner(each, math.inf)) for part, each in zip(config.parts, hooks, strict=True)]
        self._gates = [(part, runner) for part, runner in parts if part.gate is not None]
        self._weighted = [(part, runner) for part, runner in parts if part.gate is None]
        self._otherwise = config.otherwise

    async def on_compute_relative_reward(
        self, task: Task, candidates: list[Candidate], context: HookContext
    ) -> list[Reward]:
        """The blended rewards.

        Raises:
            HookError: a part failed; the message names it, the code is the part's.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + context.deadline_seconds
        components: list[dict[str, float]] = [{} for _ in candidates]
        reasons: list[list[str]] = [[] for _ in candidates]

        async def ask(part: PartConfig, runner: HookRunner, indices: list[int]) -> list[float]:
            left = context.model_copy(update={"deadline_seconds": max(1e-3, ends - loop.time())})
            score, label = await runner.score(task, [candidates[index] for index in indices], left), part.label
            for index, reward in zip(indices, score.rewards, strict=True):
                components[index][label] = reward.value
                components[index] |= {f"{label}.{key}": value for key, value in reward.components.items()}
                if reward.reason:
                    reasons[index].append(f"{label}: {reward.reason}")
            return ranks(score.values) if part.scale == "rank" else score.values

        passing = list(range(len(candidates)))
        for part, runner in self._gates:
            values = await ask(part, runner, passing) if passing else []
            stopped = {index for index, value in zip(passing, values, strict=True) if value < (part.gate or 0.0)}
            for index in stopped:
                reasons[index].insert(0, f"stopped by the gate {part.label}")
            passing = [index for index in passing if index not in stopped]
        scored = await all_of([ask(part, runner, passing) for part, runner in self._weighted]) if passing else []
        weights = [part.weight for part, _ in self._weighted]
        blended = {
            index: sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
            for index, values in zip(passing, zip(*scored, strict=True), strict=True)
        }
        failed = min([self._otherwise, *blended.values()])
        return [
            Reward(value=blended.get(index, failed), components=components[index], reason="; ".join(reasons[index]))
            for index in range(len(candidates))
        ]


def ranks(values: list[float]) -> list[float]:
    """Ranks from 0 (lowest) to 1 (highest); ties get the mean of their ranks; a single value ranks 0.5."""
    if len(values) == 1:
        return [0.5]
    below = [sum(other < value for other in values) for value in values]
    level = [sum(other == value for other in values) - 1 for value in values]
    return [(low + ties / 2) / (len(values) - 1) for low, ties in zip(below, level, strict=True)]


def make_blend(path: Path, load_hooks: Callable[[str | Path, dict[str, Any] | None], Hooks]) -> Hooks:
    """The hooks that the YAML file at ``path`` blends.

    Args:
        path: of the file; folders in it are relative to it.
        load_hooks: loads a part by its path or name and its options.

    Raises:
        ConfigError: the file is wrong, a part does not load, or the file names itself as a part.
    """
    config = validated(BlendConfig, read_mapping(path, "blend"), str(path))

    def load(spec: str, options: dict[str, Any] | None = None) -> Hooks:
        beside = path_in(path.parent, spec)
        if beside.resolve() in (path.resolve(), path.parent.resolve()) and not (path.parent / f"{REWARD}.py").is_file():
            raise ConfigError(f"{path} names itself as a part")
        try:
            return load_hooks(beside if ":" not in spec and beside.exists() else spec, options)
        except ConfigError as exc:
            raise ConfigError(f"{path}: {exc.message}") from exc

    loaded = [load(part.hook, part.options) for part in config.parts]
    others = {name: load(spec) for name, spec in ((SUBMIT, config.submit), (SESSION_END, config.session_end)) if spec}
    submit = others[SUBMIT].submit if SUBMIT in others else None
    session_end = others[SESSION_END].session_end if SESSION_END in others else None
    for name, key, function in ((SUBMIT, "submit", submit), (SESSION_END, "session_end", session_end)):
        if name in others and function is None:
            raise ConfigError(f"{path}: {key}: {others[name].source} defines no {name}")
    return Hooks(
        Blend(config, loaded).on_compute_relative_reward,
        submit,
        source=str(path),
        session_end=session_end,
        parts=tuple(others.values()),
        code=digest_of([path.read_bytes(), *(hooks.code.encode() for hooks in (*loaded, *others.values()))]),
    )
