"""A model that was taken out of a run, in vLLM's own server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("verl", reason="needs the cpu extra")
pytestmark = pytest.mark.long

SECONDS = 300.0
IDS = [10, 20, 30, 40, 50, 60, 70, 80]


def test_vllm_serves_what_was_exported(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from adapters.verl.cpu import cpu_environment
    from adapters.verl.export import exported
    from tests.adapters.verl import saved_checkpoint

    model = saved_checkpoint.build(tmp_path / "tiny")
    checkpoint = saved_checkpoint.write(tmp_path / "global_step_1", model, tmp_path / "tiny", ranks=2)
    with exported(checkpoint, tmp_path / "out", "tiny"):
        pass
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # config.json says float32, which vLLM would round to bf16
    command = ["vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "out"), "--dtype", "float32"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--enforce-eager"]
    environ = os.environ | cpu_environment(tmp_path, "between_steps")
    with (tmp_path / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *options], stdout=log, stderr=log, env=environ, start_new_session=True
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            deadline = time.monotonic() + SECONDS
            while not _healthy(client):
                said = (tmp_path / "vllm.log").read_text()[-2000:]
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.5)
            body = {"model": str(tmp_path / "out"), "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
            told = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["prompt_logprobs"]
            chat = {"model": str(tmp_path / "out"), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=chat).raise_for_status().json()["choices"]
    finally:
        process.terminate()
        process.wait(60)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = network(torch.tensor([IDS])).logits[0].log_softmax(-1)
    for place, token in enumerate(IDS[1:]):
        assert abs(told[place + 1][str(token)]["logprob"] - expected[place, token].item()) < 1e-3


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
