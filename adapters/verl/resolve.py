"""``python -m adapters.verl --resolve``: verl's configuration for a job, and where each value of it comes from.

Invariant: nothing is started and neither torch nor verl is imported; what is refused here is what an engine would
refuse before it starts anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from adapters.models import resolve_model
from adapters.verl.config import as_told, dotted_items, implied_values, resolve_device, verl_config
from adapters.verl.machine import check_machine
from adapters.verl.parsers import VLLM
from swarm.errors import ConfigError
from swarm.job import LAYERS, OURS, VERL, TrainJob

_PARSERS = ("tool_call_parser", "reasoning_parser")


def main() -> None:
    """Answer the question on stdin (see :class:`swarm.server.engine.resolving.Resolver`) on stdout, as JSON."""
    asked = json.load(sys.stdin)
    try:
        job = TrainJob.model_validate(asked["job"])
        if asked["runs_here"]:
            check_machine(job, resolve_device(job))
        answer = resolve(job, asked["fields"], asked["overrides"], Path(asked["run_dir"]))
    except ConfigError as exc:
        answer = {"error": exc.message, "param": exc.param}
    print(json.dumps(answer, default=str), flush=True)


def resolve(job: TrainJob, fields: Mapping[str, str], overrides: Mapping[str, str], run_dir: Path) -> dict[str, Any]:
    """verl's configuration for ``job`` (``config``), and the source of each of its values (``sources``).

    Args:
        job: of :func:`swarm.job.layered`.
        fields: the layer of each field that was given.
        overrides: the layer of each of the job's ``flat_overrides``.
        run_dir: of the engine.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    model, device = resolve_model(job.model), resolve_device(job)
    # refuse a wrong key before asking the hub for the model's files
    verl_config(job.model_copy(update=dict.fromkeys(_PARSERS, "none")), model, run_dir, device)
    config = verl_config(job, model, run_dir, device)
    implied = _decided_by(job, fields, model, run_dir)
    sources: dict[str, str] = {}
    for key, node in dotted_items(config):
        text = node._value()
        verls = f"{VERL}: {text}" if isinstance(text, str) and "${" in text else VERL
        sources[key] = _of(overrides, key) or _of(implied, key) or verls
    return {"config": as_told(config), "sources": sources}


def _decided_by(job: TrainJob, fields: Mapping[str, str], model: str, run_dir: Path) -> dict[str, str]:
    """For each key that a job implies, the source of its value: the given fields with which it changes, if any."""
    implied = dict(dotted_items(implied_values(job, model, run_dir, resolve_device(job))))
    deciding: dict[str, list[str]] = {key: [] for key in implied}
    for name in fields:
        other = TrainJob.model_construct(**{**job.__dict__, name: _another(name, getattr(job, name))})
        path = f"{model}." if name == "model" else model
        try:
            changed = dict(dotted_items(implied_values(other, path, run_dir, resolve_device(other))))
        except (ArithmeticError, TypeError, ValueError, OSError, ConfigError):
            # it is not a value that the others go with
            continue
        for key in implied:
            if key not in changed or changed[key] != implied[key]:
                deciding[key].append(name)
    deciding |= {f"{VLLM}.{parser}": [parser] if parser in fields else [] for parser in _PARSERS}
    return {key: _named(names, fields) for key, names in deciding.items()}


def _named(names: list[str], fields: Mapping[str, str]) -> str:
    """``"job: lr"``: the strongest layer of these fields, and the fields."""
    return f"{min((fields[name] for name in names), key=LAYERS.index)}: {', '.join(names)}" if names else OURS


def _another(name: str, value: Any) -> Any:
    """Another value for a field of a job."""
    annotation = TrainJob.model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return next(choice for choice in reversed(get_args(annotation)) if choice != value)
    match value:
        case None:
            return "x" if str in get_args(annotation) else 1
        case bool():
            return not value
        case int() | float():
            return value * 2 + 2
        case str():
            return f"{value}x"
        case _:
            return [*value, "x"] if isinstance(value, list) else value


def _of(values: Mapping[str, str], key: str) -> str | None:
    """What ``values`` has for ``key`` or for what it is a part of."""
    while key and key not in values:
        key = key.rpartition(".")[0]
    return values.get(key)
