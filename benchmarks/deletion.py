"""How long the deletion of one key among many episodes takes, and whether a byte of it is left.

The journal is filled through the server's own writer, rows of the forms that a server appends: a claim, a call and an
end of each episode, one in ``--every`` of them of the key. The time is that of ``Journal.erase``: the search, the rows,
the log, and SQLite's `VACUUM`. Then the whole folder is searched for marks of all that was deleted. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from swarm.server.config import ServerConfig
from swarm.server.episodes.timelines import merge_calls
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import CallRow, EndRow, EpisodeRow, JournalRow, StateRow
from swarm.states import EpisodeState
from swarm.subjects import Subject, Tombstone
from swarm.tokens import ModelCall, Trajectory
from swarm.types import Notes, WorkflowOutput

_CHUNK = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=1000, help="one in so many episodes is of the key")
    parser.add_argument("--tokens", type=int, default=60, help="of a prompt, and of an answer")
    parser.add_argument("--folder", type=Path, help="where the journal is made and removed; default: the system's")


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(asyncio.run(_measure(Path(folder), options)), indent=1))


async def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = folder / "journal.db"
    journal = Journal.open(path, ServerConfig(keep_episodes=2 * options.episodes, keep_bytes=1 << 50))
    began = time.perf_counter()
    for first in range(0, options.episodes, _CHUNK):
        numbers = range(first, min(first + _CHUNK, options.episodes))
        journal.append(*(row for number in numbers for row in _episode(number, options)))
        journal.append(StateRow([_name(number) for number in numbers], EpisodeState.TRAINED, f"batch {first}", first))
        await journal.synced()
    filled, size = time.perf_counter() - began, path.stat().st_size
    subject = Subject(key="hers")
    began = time.perf_counter()
    report = await journal.report(subject)
    looked = time.perf_counter() - began
    began = time.perf_counter()
    await journal.erase(Tombstone(id="measured", subject=subject, until=time.time()))
    erased = time.perf_counter() - began
    left = await asyncio.to_thread(_marks, folder)
    await journal.close()
    return {
        "episodes": options.episodes,
        "of_the_key": sum(report.episodes.values()),
        "journal_gigabytes": round(size / 1e9, 2),
        "seconds_to_fill": round(filled, 1),
        "seconds_of_report": round(looked, 2),
        "seconds_of_deletion": round(erased, 2),
        "marks_left": left,
    }


def _marks(folder: Path) -> int:
    return sum(part.read_bytes().count(b"hers of ") for part in folder.iterdir())


def _name(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 128):032x}"


def _episode(number: int, options: argparse.Namespace) -> list[JournalRow]:
    name, key = _name(number), "hers" if number % options.every == 0 else f"key {number % 97}"
    ids = np.arange(options.tokens, dtype=np.int32) + number
    call = ModelCall(
        call_id=f"{key} of {number}",
        prompt_ids=ids,
        response_ids=ids,
        logprobs=np.zeros(options.tokens, np.float32),
        min_policy_version=0,
        max_policy_version=0,
        finish_reason="stop",
    )
    notes = Notes(key=key, group_id=f"group {number // 8}", request_id=f"{key} of {number}", reason="short and right")
    trajectory = Trajectory(
        episode_uuid=name, task_id=f"task {number // 8}", reward=1.0, num_calls=1, timelines=merge_calls([call])
    )
    output = WorkflowOutput(reward=1.0, notes=notes)
    return [
        EpisodeRow(name, "client", "train", b"k" * 32, 240.0, 600.0, 1.5e9),
        CallRow(name, call),
        EndRow(
            name,
            "client",
            EpisodeState.FINISHED,
            "ended",
            1.5e9,
            trajectory.task_id,
            output,
            trajectory=trajectory,
            kept_call=call.call_id,
        ),
    ]
