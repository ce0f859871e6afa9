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

from reward_hooks.judges.client import JudgeClient
from reward_hooks.judges.endpoint import Endpoint
from reward_hooks.judges.judge import Judge
from reward_hooks.judges.listwise import Listwise, ListwiseConfig
from reward_hooks.judges.pairwise import Pairwise, PairwiseConfig
from reward_hooks.judges.pointwise import Pointwise, PointwiseConfig
from reward_hooks.judges.score_model import ScoreModel, ScoreModelConfig
from reward_hooks.judges.settings import (
    load_judge,
    make_judge,
    make_listwise,
    make_pairwise,
    make_pointwise,
    make_score_model,
)
from reward_hooks.judges.spending import Spending, metered

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
