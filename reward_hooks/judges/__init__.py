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

The module of each kind documents its source and its failure mode. Any server that speaks the OpenAI wire works, also a
vLLM that serves the model in training. A judge that is over budget, gives no readable verdict or is too late raises
``HookError`` with the reason: the group is not trained, and there is no default score. Judges with the same
:class:`JudgeClient` share its limits, budget and cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_hooks.judges.endpoint import Endpoint
from reward_hooks.judges.judge import Judge
from reward_hooks.judges.judge_client import JudgeClient
from reward_hooks.judges.listwise import Listwise
from reward_hooks.judges.pairwise import Pairwise
from reward_hooks.judges.pointwise import Pointwise
from reward_hooks.judges.score_model import ScoreModel
from reward_hooks.spending import Spending, metered
from swarm.errors import ConfigError
from swarm.importer import note_read
from swarm.validation import parse_mapping, read_text

__all__ = ["Endpoint", "Judge", "JudgeClient", "Spending", "load_judge", "make_judge", "metered"]

_KINDS: dict[str, type[Judge]] = {judge.name: judge for judge in (Listwise, Pairwise, Pointwise, ScoreModel)}


def make_judge(settings: Mapping[str, Any], client: JudgeClient | None = None, *, where: str = "judge") -> Judge:
    """The judge of ``settings``: its ``kind`` and the settings of that kind, which a blend gives as options.

    Args:
        client: shared with other judges; default: one of its own.
        where: how errors call the settings.

    Raises:
        ConfigError: an unknown key, a value out of range, or no key in the environment.
    """
    kind = str(settings.get("kind"))
    if kind not in _KINDS:
        raise ConfigError(f"{where}: kind is {kind!r}; use {', '.join(_KINDS)}")
    # YAML has keys of other types, which are unknown ones
    return _KINDS[kind](client, where, **{str(name): value for name, value in settings.items()})


def load_judge(path: str | Path, client: JudgeClient | None = None) -> Judge:
    """The judge of a YAML file, which counts as code of the hook that loads it; see :func:`make_judge`."""
    text = read_text(Path(path), "judge")
    note_read(Path(path), text)
    return make_judge(parse_mapping(text, f"the judge {path}"), client, where=str(path))
