"""A researcher that is a model: reads the study's state, asks an OpenAI-compatible endpoint, prints the next proposal.

The OpenAI SDK reads OPENAI_BASE_URL and OPENAI_API_KEY; OPENAI_MODEL names the model. A gateway may serve it, if its
context holds the state (some thousand tokens); it does not train on the question. The study checks what is proposed,
and tells it next time why it was refused.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

INSTRUCTION = """You plan experiments for a reinforcement learning study. You get its state as JSON: the question, the
base job and settings, and the experiments so far with their scores by training step, their gain over the base, and
why some were refused. Answer with one JSON object and nothing else: {"hypothesis": "one sentence: what you expect and
why", "set": {"lr": 3e-5}}. Keys of "set" are fields of the job, or settings.NAME. Never repeat an experiment. If
nothing is worth trying any more, answer {"done": "why"}."""
#: Characters of the state that are sent: what came last, where it is more.
MOST = 20_000


def proposal_of(text: str) -> dict[str, Any]:
    """The JSON object in the answer of a model, which may stand in a fence or between words."""
    found = re.search(r"\{.*\}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the model answered without JSON: {text[:200]!r}")
    answer = json.loads(found[0])
    return {key: answer[key] for key in ("hypothesis", "set", "patch", "done") if key in answer}


def main() -> None:
    from openai import OpenAI

    state = json.load(sys.stdin)
    while len(json.dumps(state)) > MOST and state["experiments"]:
        state["experiments"].pop(0)
    completion = OpenAI().chat.completions.create(
        model=os.environ.get("OPENAI_MODEL", "smollm2-135m"),
        messages=[{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": json.dumps(state)}],
        extra_headers={"x-swarm-train": "false"},
    )
    print(json.dumps(proposal_of(completion.choices[0].message.content or "")))


if __name__ == "__main__":
    main()
