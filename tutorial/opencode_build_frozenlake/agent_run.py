"""One episode: the model walks over a frozen lake, one call for each move, with all earlier moves in the conversation.

    python agent_run.py SFF/FHF/FFG

lets the model that trains (or has just been trained) walk in an eval episode, which trains nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from frozen_lake import MOVES, FrozenLake, neighbour
from openai import OpenAI, OpenAIError

from swarm.client import EpisodeEndpoint, SwarmClient
from swarm.errors import SwarmGatewayError
from swarm.types import Task, WorkflowOutput

SWARM_URL = os.environ.get("SWARM_URL", "http://127.0.0.1:10086")
DISCOUNT = 0.9
MAX_TOKENS = 4  # of one move
NAMES = {"S": "ice", "F": "ice", "H": "a hole", "G": "the goal"}
EXAMPLES: list[Any] = [
    {"role": "system", "content": "You walk to the goal. Never step into a hole. Answer left, down, right or up."},
    {"role": "user", "content": "Left is ice, down is a hole, right is ice, up is the edge. The goal is 2 right."},
    {"role": "assistant", "content": "right"},
    {"role": "user", "content": "Left is ice, down is ice, right is the goal, up is a hole. The goal is 1 right."},
    {"role": "assistant", "content": "right"},
    {"role": "user", "content": "Left is a hole, down is ice, right is the edge, up is ice. The goal is 2 up."},
    {"role": "assistant", "content": "up"},
]
_MOVE = re.compile("|".join(MOVES), re.IGNORECASE)


def execute(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
    """The episode at ``api``: a walk over the lake of ``task``, rewarded by the discounted return of its first move."""
    with OpenAI(base_url=api.base_url, api_key=api.api_key, timeout=300.0) as client:
        lake = task.main_query.split("/")
        moves, rewards = walk(FrozenLake(lake), lake, client)
    return WorkflowOutput(
        reward=discounted(rewards),
        is_success=sum(rewards) > 0,
        log_metrics={"moves": float(len(moves))},
        metadata={"moves": moves},
    )


def walk(env: FrozenLake, lake: Sequence[str], client: OpenAI) -> tuple[list[str], list[float]]:
    """The moves until the walk is over, and the reward of each; an answer that is no move ends it."""
    moves: list[str] = []
    rewards: list[float] = []
    messages = list(EXAMPLES)
    cell, _ = env.reset()
    over = False
    while not over:
        messages.append({"role": "user", "content": seen(lake, cell)})
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=MAX_TOKENS)
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        move = _MOVE.search(said)
        if move is None:
            break
        cell, reward, terminated, truncated, _ = env.step(MOVES.index(move[0].lower()))
        moves.append(move[0].lower())
        rewards.append(reward)
        over = terminated or truncated
    return moves, rewards


def seen(lake: Sequence[str], cell: int) -> str:
    """What the model is told where it stands at ``cell``."""
    cells, columns = "".join(lake), len(lake[0])
    around = [neighbour(lake, cell, action) for action in range(len(MOVES))]
    sides = [
        f"{name} is {'the edge' if there is None else NAMES[cells[there]]}"
        for name, there in zip(MOVES, around, strict=True)
    ]
    goal = cells.index("G")
    down, right = goal // columns - cell // columns, goal % columns - cell % columns
    far = [f"{abs(n)} {MOVES[after if n > 0 else before]}" for n, before, after in ((down, 3, 1), (right, 0, 2)) if n]
    return f"{', '.join(sides).capitalize()}. The goal is {' and '.join(far)}."


def discounted(rewards: Sequence[float]) -> float:
    """The return of the first move: the sum over moves k (0 for the first) of ``DISCOUNT ** k * rewards[k]``."""
    return sum(DISCOUNT**k * reward for k, reward in enumerate(rewards))


def main() -> int:
    parser = argparse.ArgumentParser(description="Let the model walk over one lake.")
    parser.add_argument("lake", help="rows of S, F, H and G, e.g. SFF/FHF/FFG")
    parser.add_argument("--swarm-url", default=SWARM_URL)
    arguments = parser.parse_args()
    try:
        with SwarmClient(arguments.swarm_url) as client, client.episode(episode_type="eval") as episode:
            output = execute(Task(task_id="asked", main_query=arguments.lake), episode.endpoint)
            episode.end("asked", output)
    except (SwarmGatewayError, OpenAIError) as exc:
        print(f"agent_run: {exc}", file=sys.stderr)
        return 1
    print(f"{' '.join(output.metadata['moves']) or 'no move'}: {'the goal' if output.is_success else 'not the goal'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
