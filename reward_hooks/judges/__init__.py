"""Judges: rewards from language models and reward models behind HTTP, configured by a mapping or a YAML file::

    # on_compute_relative_reward.py
    from pathlib import Path
    from reward_hooks.judges import load_judge

    on_compute_relative_reward = load_judge(Path(__file__).with_name("judge.yaml"))

    # judge.yaml
    kind: listwise              # or pairwise, pointwise, score_model
    rubric: Correct first, then short.
    endpoint:
      base_url: https://api.example.com/v1
      model: some-judge
      api_key_env: JUDGE_API_KEY
      input_price: 0.5          # per million tokens
      output_price: 1.5
      max_cost: 20
      max_concurrency: 16

Each kind's module tells its source and how it fails. Any server that speaks the OpenAI wire will do, a vLLM that serves
the model in training included. A judge that is over budget, gives no readable verdict or is too late raises
``HookError`` with the reason: the group is not trained, and there is no default score. Judges that are given the same
:class:`JudgeClient` share its limits, its budget and its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from reward_hooks.judges.client import JudgeClient
from reward_hooks.judges.endpoint import Endpoint, Spending, metered
from reward_hooks.judges.judge import Judge
from reward_hooks.judges.listwise import Listwise, ListwiseConfig
from reward_hooks.judges.pairwise import Pairwise, PairwiseConfig
from reward_hooks.judges.pointwise import Pointwise, PointwiseConfig
from reward_hooks.judges.score_model import ScoreModel, ScoreModelConfig
from swarm.errors import ConfigError

__all__ = [
    "Endpoint",
    "Judge",
    "JudgeClient",
    "Listwise",
    "ListwiseConfig",
    "Pairwise",
    "PairwiseConfig",
    "Pointwise",
    "PointwiseConfig",
    "ScoreModel",
    "ScoreModelConfig",
    "Spending",
    "load_judge",
    "make_judge",
    "make_listwise",
    "make_pairwise",
    "make_pointwise",
    "make_score_model",
    "metered",
]


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
