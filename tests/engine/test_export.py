"""A model that was taken out of a run says what was served: in transformers, in ``vllm serve``, as a job's model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from swarm.client import SwarmClient
from tests.engine import tiny_model
from tests.engine.engine_process import DEVICE, LEARNING_RATE, TOLERANCE
from tests.engine.test_gateway_loop import ASK, HOOKS, READY_SECONDS, STEP_SECONDS, command
from tests.ports import free_ports
from tests.up_process import Up, Users

pytest.importorskip("verl", reason="needs the cpu extra")
pytestmark = pytest.mark.long

#: Token ids of prompt and answer, and the log-probability of each of the answer's.
Said = tuple[list[int], list[float]]


def say(url: str, key: str, model: str) -> Said:
    """An answer that is sampled at ``url``."""
    body = {**ASK, "model": model, "max_tokens": 16, "logprobs": True, "return_token_ids": True}
    answer = httpx.post(
        f"{url}/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=STEP_SECONDS,
        trust_env=False,
    )
    told = answer.raise_for_status().json()
    [choice] = told["choices"]
    ids = [*told["prompt_token_ids"], *choice["token_ids"]]
    return ids, [entry["logprob"] for entry in choice["logprobs"]["content"]]


def distance(said: Said, model: Path) -> float:
    """The largest difference between these log-probabilities and transformers' own."""
    import torch
    from transformers import AutoModelForCausalLM

    ids, logprobs = said
    network = AutoModelForCausalLM.from_pretrained(model)
    assert network.dtype == torch.float32
    with torch.no_grad():
        expected = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(ids) - len(logprobs)
    assert logprobs
    return max(abs(expected[first + n - 1, ids[first + n]].item() - one) for n, one in enumerate(logprobs))


@contextmanager
def running(folder: Path, model: str, run_dir: str) -> Generator[Up]:
    job = {
        "model": model,
        "device": DEVICE,
        "batch_size": 2,
        "num_repeat": 4,
        "max_prompt_length": 256,
        "max_response_length": 16,
        # two steps show
        "lr": LEARNING_RATE,
        "total_training_steps": 2,
        "serve_after_training": True,
        "save_freq": 1,
    }
    sections = {
        "job": job,
        "swarm": {"port": 0, "run_dir": run_dir},
        "gateway": {"port": 0, "hooks": "letters:hooks"},
    }
    path = folder / f"{run_dir}.yaml"
    path.write_text(yaml.safe_dump(sections))
    up = Up(path)
    try:
        up.expect("ready", READY_SECONDS)
        yield up
        assert up.interrupt() == 0
    finally:
        up.end()


def served(up: Up, model: str) -> Said:
    """An answer of the policy of ``up``."""
    with SwarmClient(up.url("swarm server")) as swarm:
        uuid, episode = swarm.begin_episode(episode_type="eval")
        said = say(episode.base_url, episode.api_key, model)
        swarm.abort([uuid])
    return said


@contextmanager
def vllm_serve(model: Path, folder: Path) -> Generator[str]:
    from adapters.verl.cpu import cpu_environment

    [port] = free_ports(1)
    # vLLM rounds float32 to bf16 unless it is told
    options = ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256"]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *options, "--enforce-eager"],
            stdout=log,
            stderr=log,
            env=os.environ | cpu_environment(folder, "between_steps"),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _healthy(f"http://127.0.0.1:{port}"):
            said = (folder / "vllm.log").read_text()[-2000:]
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_what_is_taken_out_says_what_was_served(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "tiny")
    (tmp_path / "letters.py").write_text(HOOKS)
    with running(tmp_path, "tiny", "run") as up:
        with Users(f"{up.url('gateway')}/v1", ASK, patience=STEP_SECONDS) as users:
            for _ in range(2):
                up.expect("step", STEP_SECONDS)
        assert {one.status for one in users.answers} == {200}
        said = served(up, "tiny")
        # the run goes on meanwhile
        told = command("models", "export", "--run-dir", "run", "--out", "mine", cwd=tmp_path)
    assert (told["step"], told["dtype"]) == (2, "float32")
    mine = tmp_path / "mine"
    text = (mine / "config.json").read_text() + (mine / "README.md").read_text()
    assert str(tmp_path) not in text, "it tells of this machine"
    far: dict[str, Any] = {"transformers": distance(said, mine), "the base model": distance(said, base)}
    with vllm_serve(mine, tmp_path) as url:
        far["vllm serve"] = distance(say(url, "none", str(mine)), mine)
    with running(tmp_path, "mine", "again") as up:
        far["job.model"] = distance(served(up, "mine"), mine)
    print(far)
    assert far.pop("the base model") > 0.01, "two steps changed nothing"
    assert max(far.values()) < TOLERANCE, far
