"""Steps of a job of ``docs/gpus/`` at its full size, with memory beside what was computed:
``python -m benchmarks.gpu.sized FILE``

The model has random weights in the shape of the one that the job names: nothing is downloaded, and nothing is learned.
Real Ray, verl and vLLM; ``--answer`` tokens are sampled for each of ``batch_size`` x ``num_repeat`` answers. JSON goes
to stdout. ``gpu_memory_utilization`` is taken of a GPU of the size that the file is for. Memory is the most that torch
had in the trainer, in GB (1e9 bytes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.gpu.memory import MODELS, Shape, of_file
from swarm.job import TrainJob
from swarm.link.messages import RolloutReady
from swarm.tokens import TrainBatch, TrainGroup, Trajectory
from tests.engine import tiny_model
from tests.engine.engine_process import EngineProcess, sample, timeline

BOOT, STEP = 500.0, 300.0
#: of a prompt; each is a token to the tiny model
DIGITS = "0123456789"
#: of a prompt that are the template's and the task's
OTHER_TOKENS = 17

# in a process of its own, which gives the GPU's memory back
WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16)
network.save_pretrained(sys.argv[1], max_shard_size="4GB")
"""

GPU = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"


def build(folder: Path, shape: Shape) -> Path:
    """Write a random Qwen2 of this shape to ``folder``, with the tiny model's tokenizer and words that nobody says."""
    tiny_model.build(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"~{number}~": number for number in range(len(vocabulary), shape.vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    width = 64 if shape.keys <= 128 else 128
    config |= {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "max_window_layers": shape.layers,
        "num_attention_heads": shape.hidden // width,
        "num_key_value_heads": shape.keys // width,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": shape.tied,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    subprocess.run([sys.executable, "-c", WEIGHTS, str(folder)], check=True)
    return folder


async def batch_of(job: TrainJob, http: httpx.AsyncClient, ready: RolloutReady, prompt: int, answer: int) -> TrainBatch:
    """Sampled by vLLM, all at once, with random rewards."""

    async def trajectory(task: str) -> Trajectory:
        call = await sample(
            http, ready, f"{task} {(DIGITS * prompt)[: prompt - OTHER_TOKENS]}", max_tokens=answer, ignore_eos=True
        )
        return Trajectory(
            episode_uuid=uuid.uuid4().hex,
            task_id=task,
            reward=random.random(),
            timelines=[timeline(call)],
            num_calls=1,
        )

    async def group(task: str) -> TrainGroup:
        trajectories = await asyncio.gather(*(trajectory(task) for _ in range(job.num_repeat)))
        return TrainGroup(task_id=task, trajectories=trajectories)

    tasks = [f"{random.randrange(1000, 10000)} {number}" for number in range(job.batch_size)]
    return TrainBatch(batch_id=uuid.uuid4().hex, groups=await asyncio.gather(*map(group, tasks)))


async def measure(job: TrainJob, run_dir: Path, steps: int, prompt: int, answer: int) -> dict[str, Any]:
    """``steps`` steps of ``job``, whose model is a folder; ``prompt``, about, and ``answer`` are in tokens."""
    rows: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=job.batch_size * job.num_repeat)
    async with (
        httpx.AsyncClient(timeout=STEP, trust_env=False, limits=limits) as http,
        EngineProcess(job, run_dir) as engine,
    ):
        ready = await engine.expect(RolloutReady, BOOT)
        for _ in range(steps):
            began = time.monotonic()
            batch = await batch_of(job, http, ready, prompt, answer)
            sampled = time.monotonic() - began
            result, following = await engine.train(batch, STEP)
            rows.append(step_row(batch, result.metrics, sampled, time.monotonic() - began - sampled))
            # whoever ends it early has them
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if following is None:
                break
            ready = following
        stages = {f"{role} {stage}": round(seconds, 1) for seconds, role, stage in engine.boot}
    return {"boot": stages, "steps": rows}


def step_row(batch: TrainBatch, metrics: Mapping[str, float], sampled: float, away: float) -> dict[str, Any]:
    """What a step took: seconds until it was sampled, and until vLLM served again; GB that torch had in the trainer."""
    calls = [trajectory.timelines[0] for group in batch.groups for trajectory in group.trajectories]
    row: dict[str, Any] = {
        "sampling s": round(sampled, 1),
        "prompt tokens": len(calls[0].prompt_ids),
        "sampled tokens": sum(len(call.response_ids) for call in calls),
        "until it serves again s": round(away, 1),
    }
    for name, value in metrics.items():
        if name.startswith("timing_s/"):
            row[f"{name.removeprefix('timing_s/')} s"] = round(value, 2)
        elif name.startswith("actor/perf/max_memory"):
            # verl's gigabytes are 2**30 bytes
            row[f"{name.removeprefix('actor/perf/max_memory_').removesuffix('_gb')} GB"] = round(value * 2**30 / 1e9, 1)
        elif name in ("training/rollout_probs_diff_max", "swarm/adapter_difference"):
            row[name] = value
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sized", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a configuration of `up` whose job names a model of the table in docs")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--answer", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep model, log and checkpoints there")
    options = parser.parse_args()
    job = TrainJob.model_validate(yaml.safe_load(options.file.read_text())["job"])
    shape = MODELS[job.model]
    computed = of_file(options.file)
    whole = int(subprocess.run([sys.executable, "-c", GPU], check=True, stdout=subprocess.PIPE).stdout)
    with tempfile.TemporaryDirectory(prefix="sized-") as temporary:
        folder = options.keep or Path(temporary)
        began = time.monotonic()
        changes = {
            "model": str(build(folder / "model", shape)),
            "device": "cuda",
            "gpu_memory_utilization": computed.vllm / whole,
        }
        job = job.model_copy(update=changes)
        built = time.monotonic() - began
        measured = asyncio.run(measure(job, folder / "run", options.steps, options.prompt, options.answer))
    report = {
        "file": options.file.name,
        "model written s": round(built, 1),
        "computed GB": {"training": computed.training / 1e9, "serving": computed.serving / 1e9},
        "computed KV tokens": computed.kv_tokens,
        **measured,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
