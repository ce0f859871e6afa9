"""The engine's main process, up to the point where it would start Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.verl.causes import REASON_FILE, passed_deadline
from swarm.errors import ConfigError
from swarm.job import TrainJob
from swarm.link.imported import CODE_VARIABLE
from swarm.link.messages import Goodbye
from swarm.machine import CURE, GPU_CURE
from tests.engine.engine_process import EngineProcess

pytestmark = pytest.mark.slow

pytest.importorskip("adapters.verl.config", reason="needs the cpu or gpu extra")
ray_exceptions = pytest.importorskip("ray.exceptions", reason="needs the cpu or gpu extra")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


async def refusal(job: TrainJob, run_dir: Path) -> str:
    """The error with which the engine finishes; it must be a configuration error (exit code 2)."""
    async with EngineProcess(job, run_dir) as engine:
        finished = await engine.expect(Goodbye, 60)
        assert finished.wrong_config
        assert await engine.process.wait() == 2, engine.tail()
    return finished.error


@pytest.mark.anyio
async def test_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    error = await refusal(TrainJob(model=str(tmp_path / "nowhere"), device="cpu"), tmp_path / "run")
    assert "there is no model folder" in error and "nowhere" in error


@pytest.mark.anyio
async def test_misspelt_override_is_one_clear_line(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / REASON_FILE).write_text("the deadline of an earlier run")
    job = TrainJob(model=str(model), device="cpu", overrides={"actor_rollout_ref.actor.clip_ration": 0.2})
    assert "clip_ration" in await refusal(job, run_dir)
    assert passed_deadline(run_dir) == "", "it would hide the cause of every later crash"


@pytest.mark.anyio
async def test_unreadable_job_is_reported(tmp_path: Path) -> None:
    class Broken(EngineProcess):
        def job_text(self) -> str:
            return "modle: tiny\n"

    async with Broken(TrainJob(model="m"), tmp_path / "run") as engine:
        finished = await engine.expect(Goodbye, 60)
    assert "modle" in finished.error


def test_started_by_hand_says_how_it_is_started(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    done = subprocess.run(
        [sys.executable, "-m", "adapters.verl", str(tmp_path / "job.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "started by the swarm server" in done.stderr
    assert "Traceback" not in done.stderr


def test_root_cause_looks_through_rays_wrappers() -> None:
    from adapters.verl.causes import root_cause

    inner = ValueError("first line\nmax_model_len (18000) is larger than the model's 8192")
    task = ray_exceptions.RayTaskError("run", "a long remote traceback", inner)
    assert root_cause(task) == "ValueError: max_model_len (18000) is larger than the model's 8192"
    assert root_cause(task.as_instanceof_cause()).startswith("ValueError: max_model_len")
    assert root_cause(RuntimeError()) == "RuntimeError: no message"
    # of hydra, whose cause Ray has left behind
    named = (
        "Error in call to target 'verl.Model':\nModuleNotFoundError(\"No module named 'mine'\")\nfull_key: actor.model"
    )
    assert root_cause(RuntimeError(named)) == "RuntimeError: ModuleNotFoundError(\"No module named 'mine'\")"


# of verl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm.rollout_correction": {"bypass_mode": True, "rollout_is": "nonsense", "rollout_rs": "token_k1"}},
        {"algorithm.rollout_correction": None},
        {"actor_rollout_ref.actor.use_kl_loss": None, "algorithm.use_kl_in_reward": None},
        {"actor_rollout_ref.actor.kl_loss_type": "nonsense"},
    ],
    ids=["bypassed", "none", "null", "unused"],
)
def test_what_no_step_reads_is_not_tried(model: Path, overrides: dict[str, Any]) -> None:
    from adapters.verl.config import verl_config
    from adapters.verl.task_runner import check

    fields: dict[str, Any] = {"tool_call_parser": "none", "reasoning_parser": "none", "overrides": overrides}
    check(verl_config(TrainJob(model=str(model), device="cpu", **fields), str(model), model, "cpu"))


# of verl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode", "nonsense", "Invalid loss_agg_mode"),
        # of the first step
        ("algorithm.adv_estimator", "nonsense", "Unknown advantage estimator"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "nonsense", "Unsupported loss mode"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "dro", "policy_loss.dro_beta must be a positive value"),
        ("actor_rollout_ref.actor.clip_ratio_c", 1.0, "clip_ratio_c for dual-clip PPO should be greater than 1.0"),
        ("actor_rollout_ref.actor.kl_loss_type", "nonsense", "there is no KL penalty 'nonsense'"),
        ("algorithm.rollout_correction.rollout_is", "nonsense", "Invalid rollout_is: nonsense"),
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            "nonsense",
            "could not convert string to float: 'nonsense'",
        ),
        ("algorithm.rollout_correction.rollout_rs", "nonsense", "rollout_rs_threshold must be"),
        # of what comes before the first step, when all has started
        ("trainer.logger", ["console", "nonsense"], "job.logger: there is no 'nonsense'; there are wandb, mlflow"),
        ("trainer.logger", "absent", "job.logger: absent is not installed: pip install absent for "),
    ],
)
def test_no_other_trainer_is_started_where_the_job_is_at_fault(
    model: Path, key: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils.tracking import Tracking

    from adapters.verl import task_runner
    from adapters.verl.causes import is_final
    from adapters.verl.config import verl_config
    from adapters.verl.task_runner import check

    monkeypatch.setattr(task_runner, "_PACKAGES", ("absent",))
    monkeypatch.setattr(Tracking, "supported_backend", [*Tracking.supported_backend, "absent"])
    fields: dict[str, Any] = {
        "kl_coef": 0.01,
        "tool_call_parser": "none",
        "reasoning_parser": "none",
        "overrides": {key: value},
    }
    job = TrainJob(model=str(model), device="cpu", **fields)
    with pytest.raises(ConfigError, match=rf"verl refuses the job's configuration: .*{why}") as refused:
        check(verl_config(job, str(model), model, "cpu"))
    ended: Any = ray_exceptions.RayTaskError("run", "a long remote traceback", refused.value).as_instanceof_cause()
    # the driver tells the server so: it has both classes
    assert is_final(ended) and isinstance(ended, ConfigError) and ended.message == refused.value.message
    assert not is_final(ray_exceptions.RayTaskError("run", "a long remote traceback", ValueError("x")))


def test_a_trainer_that_was_killed_or_ran_out_of_memory_is_told_with_the_cure(tmp_path: Path) -> None:
    from adapters.verl.driver import _Run

    class OutOfMemoryError(RuntimeError):
        """As torch has it."""

    run = _Run(tmp_path)
    told = run.cause(ray_exceptions.RayTaskError("run", "a remote traceback", OutOfMemoryError("CUDA out of memory")))
    assert told == f"OutOfMemoryError: CUDA out of memory: {GPU_CURE}"
    # vLLM hands on the text alone
    wake = (
        "Call to wake_up method failed: Worker failed with error 'CUDA Error: out of memory at cumem_allocator.cpp:139'"
    )
    assert run.cause(ray_exceptions.RayTaskError("fit", "a remote traceback", Exception(wake))).endswith(GPU_CURE)
    # torch's, of what it did not allocate itself, ends with advice
    cuda = (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert run.cause(RuntimeError(cuda)) == f"RuntimeError: CUDA error: out of memory: {GPU_CURE}"
    rays = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: ec24) "
        "was 3.75GB used / 23.54GB limit (0.159315)\nOOM kill reason: Memory usage 3820515328B exceeded threshold\n"
        "Refer to the documentation on how to address the out of memory issue"
    )
    told = run.cause(ray_exceptions.OutOfMemoryError(rays))
    full = "the machine's memory was full (3.75 of 23.54 GB)"
    assert told == f"Ray ended a process, for {full}: {CURE}, or end other programs"
    told = run.cause(ray_exceptions.ActorDiedError())
    # Ray does not tell a crash, such as NCCL's own end of a rank that waited too long, from a kill
    crashed = "a process of the trainer died (ActorDiedError): engine.log has its last words if it crashed; else, "
    assert told.startswith(crashed) and CURE in told
    assert run.cause(ValueError("x")) == "ValueError: x"


def test_a_missing_dependency_of_synced_code_says_which_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    from adapters.verl.causes import root_cause

    missing = ModuleNotFoundError("No module named 'einops'", name="einops")
    assert root_cause(missing) == "ModuleNotFoundError: No module named 'einops'"
    monkeypatch.setenv(CODE_VARIABLE, "/a/snapshot")
    told = root_cause(ray_exceptions.RayTaskError("run", "a long remote traceback", missing))
    assert "needs the Python module 'einops'" in told and f"install it there for {sys.executable}" in told
