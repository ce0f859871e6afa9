"""A challenger of the real engine is promoted and becomes the next incumbent, once it is not worse on a suite either,
and what trains on challenges it; then both are compared on held-out prompts.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.launch.plan import COMMAND
from swarm.checkpoints import kept_steps
from swarm.client import SwarmClient
from swarm.protocol import PromotePolicyRequest
from tests.engine import tiny_model
from tests.engine.engine_process import DEVICE
from tests.engine.test_gateway_loop import ASK, HOOKS, READY_SECONDS, STEP_SECONDS
from tests.ports import free_ports
from tests.up_process import Up, Users

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the cpu extra"),
]


@pytest.mark.parametrize("beside", [False, True], ids=["own", "beside"])
def test_a_promoted_challenger_is_served_as_the_next_incumbent(tmp_path: Path, beside: bool) -> None:
    tiny_model.build(tmp_path / "tiny")
    (tmp_path / "letters.py").write_text(HOOKS)
    (tmp_path / "held_out.jsonl").write_text("".join(f'{{"question": "{number}?"}}\n' for number in range(8)))
    job = {
        "model": "tiny",
        "device": DEVICE,
        "batch_size": 2,
        "num_repeat": 2,
        "max_prompt_length": 256,
        "max_response_length": 16,
        "serving": "always",
        "save_freq": 1,
    }
    incumbent: dict[str, Any] = {"policy": "promoted"}
    name = "the job's model" if beside else "tiny"
    if beside:
        job |= {"lora": {"rank": 4}, "lr": 1e-3}
    else:
        incumbent |= {"model": "tiny", "port": free_ports(1)[0]}
    serve = {
        "incumbent": incumbent,
        "watch_share": 1.0,
        "gate": {"mode": "manual", "margin": 0.9, "trial_every": 1, "suites": {"held_out": "held_out.jsonl"}},
    }
    gateway = {"port": 0, "hooks": "letters:hooks", "serve": serve, "sample_timeout_seconds": 30}
    path = tmp_path / "up.yaml"
    path.write_text(yaml.safe_dump({"job": job, "swarm": {"port": 0, "run_dir": "run"}, "gateway": gateway}))
    up = Up(path)
    try:
        up.expect("ready", READY_SECONDS)
        with (
            SwarmClient(up.url("swarm server")) as client,
            Users(f"{up.url('gateway')}/v1", ASK, count=2, patience=STEP_SECONDS) as users,
        ):
            first = up.expect("step", STEP_SECONDS)["step"]
            _until(lambda: _only(client)["challenger"] == first, STEP_SECONDS)
            client.promote_policy(PromotePolicyRequest(reason="to see what follows", share=1.0))
            assert up.expect("succeeding", STEP_SECONDS)["name"] == f"version {first} of {name}"
            # who succeeds is proven live, and not worse on the held-out prompts that both sides were asked
            sentences = [policy.verdict.sentence for policy in client.policies().policies if policy.verdict]
            assert any(sentence.endswith("1 of 1 suites not worse") for sentence in sentences), sentences
            up.expect("succeeded", READY_SECONDS)
            answer = httpx.post(f"{up.url('gateway')}/v1/chat/completions", json=ASK | {"max_tokens": 8}, timeout=60)
            assert (answer.status_code, answer.headers["x-swarm-source"]) == (200, "incumbent")
            # the weights that answer are no longer compared with themselves: it trains on, maybe before `up` says so
            _until(lambda: (_only(client)["challenger"] or 0) > first, STEP_SECONDS)
            assert _only(client)["incumbent"] == f"{name}, version {first}"
            users.leave()
        assert {answer.status for answer in users.answers} == {200}
        assert up.interrupt() == 0
    finally:
        up.end()
    again = Up(path)
    try:
        again.expect("ready", READY_SECONDS)
        started = [event["name"] for event in again.seen if event["event"] == "starting_incumbent"]
        assert started == ([] if beside else ["incumbent tiny"])
        with SwarmClient(again.url("swarm server")) as client:
            _until(lambda: _only(client)["incumbent"] == f"{name}, version {first}", 60.0)
        answer = httpx.post(f"{again.url('gateway')}/v1/chat/completions", json=ASK | {"max_tokens": 8}, timeout=60)
        assert (answer.status_code, answer.headers["x-swarm-source"]) == (200, "incumbent")
        assert again.interrupt() == 0
    finally:
        again.end()
    last = kept_steps(tmp_path / "run" / "checkpoints")[-1]
    files = ["--run-dir", "run", "--data", "held_out.jsonl", "--hooks", "letters:hooks", "--max-tokens", "8"]
    told = subprocess.run(
        [*COMMAND, "policies", "eval", str(last), "--against", str(first), *files, "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        timeout=2 * READY_SECONDS,
        check=True,
    ).stdout
    comparison = json.loads(told)["comparison"]
    assert comparison["prompts"] == 8 and comparison["earlier"] == f"step {first}", comparison
    assert not list((tmp_path / "run").glob(".eval-*"))


def _only(client: SwarmClient) -> dict[str, Any]:
    """The stage before the latest version: for a minute that of the incumbent before is listed too."""
    stages = (policy.stage for policy in client.policies().policies)
    return max(stages, key=lambda stage: stage.incumbent_version).model_dump()


def _until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.2)
