"""Judges from their settings: a mapping, a YAML file, or the options of a blend's part.

Invariant: a judge that is made has valid settings and its key; all else is a ``ConfigError`` that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from reward_hooks.judges.client import JudgeClient
from reward_hooks.judges.judge import Judge
from reward_hooks.judges.listwise import Listwise, ListwiseConfig
from reward_hooks.judges.pairwise import Pairwise, PairwiseConfig
from reward_hooks.judges.pointwise import Pointwise, PointwiseConfig
from reward_hooks.judges.score_model import ScoreModel, ScoreModelConfig
from swarm.errors import ConfigError

AnyJudgeConfig = Annotated[
    ListwiseConfig | PairwiseConfig | PointwiseConfig | ScoreModelConfig, Field(discriminator="kind")
]
_CONFIGS: TypeAdapter[AnyJudgeConfig] = TypeAdapter(AnyJudgeConfig)


def make_judge(settings: Mapping[str, Any], client: JudgeClient | None = None, *, where: str = "judge") -> Judge:
    """The judge that ``settings`` describe; ``kind`` says which, the rest are the fields of its configuration.

    In a blend (:mod:`reward_hooks.compose`) ``make_listwise`` and its like take the same fields as options.

    Args:
        client: shared with other judges; default: one of its own.
        where: what to call the settings in errors.

    Raises:
        ConfigError: a misspelt key, a value out of range, or no key in the environment.
    """
    try:
        config = _CONFIGS.validate_python(dict(settings))
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {field}: {first['msg']}".replace(": :", ":")) from exc
    match config:
        case ListwiseConfig():
            return Listwise(config, client)
        case PairwiseConfig():
            return Pairwise(config, client)
        case PointwiseConfig():
            return Pointwise(config, client)
        case ScoreModelConfig():
            return ScoreModel(config, client)


def make_listwise(**settings: Any) -> Judge:
    """A listwise judge by its settings, for blends that name it."""
    return make_judge({**settings, "kind": "listwise"}, where="listwise")


def make_pairwise(**settings: Any) -> Judge:
    """A pairwise judge by its settings, for blends that name it."""
    return make_judge({**settings, "kind": "pairwise"}, where="pairwise")


def make_pointwise(**settings: Any) -> Judge:
    """A pointwise judge by its settings, for blends that name it."""
    return make_judge({**settings, "kind": "pointwise"}, where="pointwise")


def make_score_model(**settings: Any) -> Judge:
    """A reward model by its settings, for blends that name it."""
    return make_judge({**settings, "kind": "score_model"}, where="score_model")


def load_judge(path: str | Path, client: JudgeClient | None = None) -> Judge:
    """The judge that a YAML file describes; see :func:`make_judge`.

    Raises:
        ConfigError: the file is missing, no YAML, or see :func:`make_judge`.
    """
    try:
        data: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the judge {path}: {exc}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping of a judge's settings, got {type(data).__name__}")
    return make_judge(data, client, where=str(path))
