"""Prompts of a dataset in a seeded order: the same seed sends the same questions in the same order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swarm.data import read_tasks
from swarm.errors import ConfigError
from swarm.types import Model


class Prompt(Model):
    """One user request: its chat messages, and what is asked as plain text for a command line."""

    text: str
    messages: list[dict[str, Any]]


def read_prompts(path: Path) -> list[Prompt]:
    """Every row of a ``.jsonl`` or ``.parquet`` file as a prompt.

    Raises:
        ConfigError: no such file, a row that asks nothing, or no row at all.
    """
    prompts = [
        Prompt(text=task.main_query, messages=task.init_messages or [{"role": "user", "content": task.main_query}])
        for task in read_tasks(path)
    ]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts


def ordered(prompts: Sequence[Prompt], seed: int, epochs: int | None) -> Iterator[Prompt]:
    """Every prompt once per epoch, each epoch in an order of its own; without end where ``epochs`` is None."""
    epoch = 0
    while epochs is None or epoch < epochs:
        order = list(prompts)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1
