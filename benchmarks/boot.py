"""Seconds from the start of ``swarm-gateway up`` to the first answer of a model, by stage; two checkouts in turn.

``python -m benchmarks boot --against FOLDER``: each round boots this checkout and the one in FOLDER, which has a
``.venv`` of its own, with a CPU, the real verl and vLLM and a tiny model. A stage lasts until the next is told.

CPU seconds are of all processes that live when the answer is there: they say more than seconds where other work runs
beside. The first boot of a machine fills caches: ``--warm-up``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.loop import cpu_seconds
from benchmarks.processes import BOOT_SECONDS, ROOT, stop
from benchmarks.serving import HOOKS

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def boot(tree: Path, folder: Path, model: Path) -> dict[str, Any]:
    """Boot the checkout ``tree`` with its files in the new ``folder``: seconds by stage and in all, and CPU seconds."""
    folder.mkdir()
    (folder / "on_compute_relative_reward.py").write_text(HOOKS)
    sizes = {"batch_size": 2, "num_repeat": 2, "max_prompt_length": 128, "max_response_length": 64}
    job = {"model": str(model), "served_model_name": "policy", "device": "cpu", **sizes}
    swarm = {"port": 0, "run_dir": "run", "boot_timeout": BOOT_SECONDS}
    gateway = {"port": 0, "hooks": ".", "routes": [{"name": "policy"}]}
    (folder / "up.yaml").write_text(yaml.safe_dump({"job": job, "swarm": swarm, "gateway": gateway}))
    python = Path(sys.executable) if tree == ROOT else tree / ".venv" / "bin" / "python"
    marks = [("servers", time.monotonic())]
    urls: dict[str, str] = {}
    process = subprocess.Popen(
        [str(python), "-m", "gateway.cli", "up", "up.yaml", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            match json.loads(line):
                case {"event": "listening", "name": name, "url": url}:
                    urls[name] = url
                case {"event": "boot", "stage": stage}:
                    marks.append((stage, time.monotonic()))
                case {"event": "ready"}:
                    break
                case _:
                    pass
        marks.append(("answer", time.monotonic()))
        answer = httpx.post(f"{urls['gateway']}/v1/chat/completions", json=BODY, timeout=120.0, trust_env=False)
        answer.raise_for_status()
        ended, cpu = time.monotonic(), cpu_seconds()
    finally:
        stop(process)
        process.stdout.close()
    stages: dict[str, float] = {}
    for (stage, since), (_, until) in itertools.pairwise([*marks, ("", ended)]):
        stages[stage] = stages.get(stage, 0.0) + until - since
    return {"seconds": ended - marks[0][1], "cpu_seconds": cpu, "stages": stages, "load": os.getloadavg()[0]}


def report_of(boots: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each checkout and, of two, the ratio of this one to the other in each round."""
    report: dict[str, Any] = {"boots": boots, "medians": {}}
    for tree, rounds in boots.items():
        names = list(dict.fromkeys(name for row in rounds for name in row["stages"]))
        report["medians"][tree] = {
            **{key: statistics.median(row[key] for row in rounds) for key in ("seconds", "cpu_seconds")},
            "stages": {name: statistics.median(row["stages"].get(name, 0.0) for row in rounds) for name in names},
        }
    if len(boots) == 2:
        for key in ("seconds", "cpu_seconds"):
            ratios = sorted(mine[key] / other[key] for mine, other in zip(*boots.values(), strict=True))
            report[f"{key}_ratio"] = {"median": statistics.median(ratios), "each": ratios}
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="boots of each checkout, in turn")
    parser.add_argument("--against", type=Path, help="another checkout, with a .venv")
    parser.add_argument("--warm-up", action="store_true", help="boot each once more before, which does not count")
    parser.add_argument("--json", type=Path, help="write the report there, after each round")


def run(options: argparse.Namespace) -> None:
    from tests.engine import tiny_model

    trees = [ROOT, *([options.against.absolute()] if options.against else [])]
    boots: dict[str, list[dict[str, Any]]] = {str(tree): [] for tree in trees}
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        model = tiny_model.build(Path(place) / "tiny")
        for number in range(-options.warm_up, options.rounds):
            for tree in trees:
                one = boot(tree, Path(place) / f"{number}-{trees.index(tree)}", model)
                print(f"round {number + 1}: {tree}: {json.dumps(one)}", file=sys.stderr, flush=True)
                if number >= 0:
                    boots[str(tree)].append(one)
            if number >= 0:
                report = report_of(boots)
                if options.json is not None:
                    options.json.write_text(json.dumps(report) + "\n")
    print(json.dumps(report, indent=2))
