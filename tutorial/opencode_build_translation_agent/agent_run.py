"""One episode: a rough translation, its terms, and the final translation, in one conversation of three model calls.

python agent_run.py "The server does not find the file."
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from grader import PATTERNS, errors_of, reward_of
from openai import OpenAI, OpenAIError

from swarm.client import EpisodeEndpoint, SwarmClient
from swarm.errors import SwarmGatewayError
from swarm.types import Task, WorkflowOutput

SWARM_URL = os.environ.get("SWARM_URL", "http://127.0.0.1:10086")
MAX_TOKENS = 48  # of one answer
STEPS = {
    "rough": "Translate this sentence into French, roughly: {sentence}",
    "terms": "Which technical terms does the English sentence have, and what are they in French?",
    "final": "Now write the final French translation with these terms. Write one line and nothing else.",
}


def execute(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
    """The episode at ``api``: every answer, and the reward of the last one."""
    with OpenAI(base_url=api.base_url, api_key=api.api_key, timeout=300.0) as client:
        said = translate(task.main_query, client)
    errors = errors_of(task, said["final"])
    return WorkflowOutput(
        reward=reward_of(errors),
        is_success=not errors,
        log_metrics={f"error/{name}": float(name in errors) for name in PATTERNS},
        metadata={**said, "errors": errors},
    )


def translate(sentence: str, client: OpenAI) -> dict[str, str]:
    """The answers by step. The whole conversation goes along each time, so all calls are one token timeline."""
    messages: list[Any] = []
    said: dict[str, str] = {}
    for step, asked in STEPS.items():
        messages.append({"role": "user", "content": asked.format(sentence=sentence)})
        answer = client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=MAX_TOKENS)
        said[step] = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said[step]})
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="Translate one sentence; nothing is trained.")
    parser.add_argument("sentence")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    arguments = parser.parse_args()
    task = Task(task_id="asked", main_query=arguments.sentence, metadata={"terms": {}})
    try:
        with SwarmClient(arguments.swarm_url) as client, client.episode(episode_type="eval") as episode:
            output = execute(task, episode.endpoint)
            episode.end(task, output)
    except (SwarmGatewayError, OpenAIError) as exc:
        print(f"agent_run: {exc}", file=sys.stderr)
        return 1
    for step in STEPS:
        print(f"{step:>6}: {output.metadata[step]}")
    print(f"errors: {', '.join(output.metadata['errors']) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
