"""A job from layers of settings: which of them wins, and where each value comes from.

Invariant: ``set`` (keywords, ``--set``) > the job > the server's defaults > the defaults of :class:`TrainJob`. Of
``overrides`` each key of verl is a value of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from swarm.errors import ConfigError
from swarm.job import SPELLINGS, TrainJob, describe_validation

#: Where a value comes from, the strongest first; then :data:`OURS` and verl.
SET, JOB, SERVER = "set", "job", "server defaults"
OURS, VERL = "swarm-gateway", "verl"
LAYERS = (SET, JOB, SERVER)


class Layered(NamedTuple):
    """A job, and the layer of each of its fields and each of its overrides."""

    job: TrainJob
    fields: dict[str, str]
    overrides: dict[str, str]


def layered(
    job: Mapping[str, Any],
    *,
    set_: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    where: str = "job",
) -> Layered:
    """The job of these layers.

    Args:
        job: fields as in a job's YAML.
        set_: fields, and keys of verl, which have dots or begin with ``+``.
        server: fields as in a job's YAML.
        where: names the job in errors.

    Raises:
        ConfigError: a misspelt field, or a value that is out of range; names each.
    """
    values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    overrides: dict[str, tuple[str, Any, str]] = {}
    for layer, given in ((SERVER, server or {}), (JOB, job), (SET, _of_set(set_ or {}))):
        for name, value in given.items():
            name = SPELLINGS.get(name, name)
            if name == "overrides" and isinstance(value, Mapping):
                for key, one in cast("Mapping[str, Any]", value).items():
                    # with + or without it is the same key
                    overrides[str(key).removeprefix("+")] = (str(key), one, layer)
            else:
                values[name], fields[name] = value, layer
    if overrides:
        values["overrides"] = {key: value for key, value, _ in overrides.values()}
    try:
        merged = TrainJob.model_validate(values)
    except ValidationError as exc:
        raise describe_validation(exc, where, TrainJob) from exc
    return Layered(merged, fields, {key: layer for key, (_, _, layer) in overrides.items()})


def _of_set(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` as fields of a job: what has a dot is a key of verl."""
    if "" in given:
        raise ConfigError("set: a value without a name")
    verl = {name.removeprefix("overrides."): value for name, value in given.items() if "." in name or name[0] == "+"}
    fields = {name: value for name, value in given.items() if "." not in name and name[0] != "+"}
    return {**fields, **({"overrides": {**fields.get("overrides", {}), **verl}} if verl else {})}
