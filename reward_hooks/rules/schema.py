"""``json_schema``: the answer is JSON that fits a schema. All or nothing, with the number of faults as a component.

Validation is JSON Schema's own (https://json-schema.org, draft as the schema's ``$schema`` says, else 2020-12) by the
``jsonschema`` package, which the extra ``swarm-gateway[rewards]`` installs. References to other documents are not
fetched.

Fails when: the schema is looser than what is meant. An object of empty strings fits most schemas, and is the shortest
thing to learn: say ``minLength``, ``enum`` and ``required``, or gate a reward about the content with this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_hooks.contract import Candidate, Reward
from reward_hooks.rules.base import Rule
from reward_hooks.rules.format import read_json
from swarm.errors import ConfigError
from swarm.types import Task

_MOST_FAULTS = 20


class SchemaChecker:
    """Finds what is wrong with values by one schema.

    Raises:
        ConfigError: ``jsonschema`` is not installed, or this is no schema.
    """

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        try:
            from jsonschema import validators
            from jsonschema.exceptions import SchemaError
            from referencing import Registry
        except ImportError as exc:
            raise ConfigError(
                "JSON schemas need the jsonschema package: pip install 'swarm-gateway[rewards]'", code="missing_extra"
            ) from exc
        kind: Any = validators.validator_for(schema, default=validators.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as exc:
            raise ConfigError(f"this is no JSON schema: {exc.message} (at {exc.json_path})") from exc
        # an empty registry: without one, references are fetched over the network
        self._validator: Any = kind(schema, registry=Registry())

    def faults(self, value: object) -> list[str]:
        """What is wrong with ``value``, each with its place; at most 20."""
        found: list[str] = []
        try:
            for error in self._validator.iter_errors(value):
                found.append(f"{error.json_path}: {error.message[:200]}")
                if len(found) == _MOST_FAULTS:
                    break
        except RecursionError:
            found.append("nested too deep to be checked")
        return found


class JsonSchema(Rule):
    """1 if the answer is JSON that fits, else 0.

    Args:
        schema: the schema, or the path of a JSON file with it.
        fenced: also accept JSON inside one fenced code block that makes up the whole answer.

    Raises:
        ConfigError: see :class:`SchemaChecker`; or the file cannot be read.
    """

    def __init__(self, schema: Mapping[str, Any] | str, *, fenced: bool = True) -> None:
        self._checker = SchemaChecker(_load(schema) if isinstance(schema, str) else schema)
        self._fenced = fenced

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        """1 or 0; the component ``faults`` is there for answers that are JSON at all."""
        try:
            value = read_json(candidate.text, fenced=self._fenced)
        except ValueError as exc:
            return Reward(value=0.0, components={"is_json": 0.0}, reason=f"no JSON: {exc}")
        faults = self._checker.faults(value)
        return Reward(
            value=float(not faults),
            components={"is_json": 1.0, "faults": float(len(faults))},
            reason="; ".join(faults[:3]),
        )


def _load(path: str) -> Mapping[str, Any]:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read the JSON schema {path}: {exc}") from exc
