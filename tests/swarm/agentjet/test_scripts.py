"""Scripts in the form of AgentJet's tutorials, run as they stand by ``python -m swarm.agentjet`` against a real swarm
server, whose engine is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.client import SwarmClient
from swarm.states import EngineState
from swarm.status import ServerStatus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0

#: What the scripts share; those of AgentJet's have the addresses and names of their authors' machines.
HEAD = """
import os
import requests
from ajet.copilot.job import AgentJetJob
from ajet.schema.task import Task, WorkflowOutput

URL = os.environ["AJET_SWARM_URL"]
N = 2
B = 2


def ask(api, text):
    answer = requests.post(
        f"{api.base_url}/chat/completions",
        json={"model": "whatever", "messages": [{"role": "user", "content": text}]},
        headers={"Authorization": f"Bearer {api.api_key}"},
        timeout=60,
    )
    return answer.json()["choices"][0]["message"]["content"]


def execute_agent(task, api):
    said = ask(api, task.main_query)
    return WorkflowOutput(reward=float(len(said) % 7), metadata={"said": said})
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a swarm server without a job."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.standins.server", "clients", str(tmp_path / "run"), "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def run(folder: Path, url: str, text: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script with :data:`HEAD` in front of it."""
    (folder / "roll.py").write_text(HEAD + textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "swarm.agentjet", "roll.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AJET_SWARM_URL": url, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout.splitlines()[-1])


def wait_for_step(client: SwarmClient, step: int) -> None:
    """Until so many steps are done: a script may end before the last one."""
    reached = threading.Event()

    def observe(status: ServerStatus) -> None:
        if status.engine.global_step >= step:
            reached.set()

    with client.watching_status(observe) as first:
        observe(first)
        assert reached.wait(PATIENCE)


def test_batch_after_batch_with_the_function_for_whole_batches(tmp_path: Path, server: str) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"main_query": "question {n}"}}\n' for n in range(4)))
    done = run(
        tmp_path,
        server,
        """
        import json
        from ajet.default_config.ajet_default import AjetTaskReader, JsonlDatasetFile, JsonlTrainingFp
        from ajet.task_reader import RouterTaskReader
        from ajet.tuner_lib.experimental.as_swarm_client import SwarmClient, run_episodes_until_all_complete

        dataset = RouterTaskReader(
            reader_type="jsonl_dataset_file",
            reader_config=AjetTaskReader(
                jsonl_dataset_file=JsonlDatasetFile(training=JsonlTrainingFp(file_path="train.jsonl"))
            ),
        )
        swarm_worker = SwarmClient(URL)
        yaml_job = AgentJetJob(
            algorithm="grpo",
            project_name="ajet-swarm",
            experiment_name="test",
            n_gpu=8,
            model="tiny",
            batch_size=B,
            num_repeat=N,
        )
        swarm_worker.sync_train_config(yaml_job)
        swarm_worker.start_engine()

        def rollout(task) -> float | None:
            episode_uuid, api_baseurl_key = swarm_worker.begin_episode()
            workflow_output = execute_agent(task, api_baseurl_key)
            swarm_worker.end_episode(task, episode_uuid, workflow_output)
            swarm_worker.print_rollout_stat()
            return workflow_output.reward

        rewards = []
        next_batch = []
        for _, task in enumerate(dataset.generate_training_tasks()):
            for _ in range(N):
                next_batch.append(task)
                if len(next_batch) >= B * N:
                    rewards += run_episodes_until_all_complete(next_batch, func=rollout, auto_retry=True)
                    next_batch.clear()
        print(json.dumps(rewards))
        """,
    )
    assert len(last_line(done)) == 8
    assert "current batch" in done.stdout
    with SwarmClient(server) as client:
        status = client.status()
        assert status.job is not None
        assert (status.job.model_name, status.job.experiment, status.job.n_gpu) == ("tiny", "test", 8)
        wait_for_step(client, 2)


def test_drains_agreements_evaluations_and_a_second_client(tmp_path: Path, server: str) -> None:
    done = run(
        tmp_path,
        server,
        """
        import json
        from ajet.tuner_lib.as_oai_baseurl_apikey import OpenaiBaseUrlAndApiKey
        from ajet.tuner_lib.experimental.interchange_utils import SwarmThrottlePolicy
        from ajet.tuner_lib.experimental.swarm_client import SwarmClient
        from ajet.utils.retry import retry_with_backoff
        from ajet.utils.thread_executors import PeriodicDrainThreadPoolExecutor

        ajet_job = AgentJetJob(
            ensure_new_experiment=True,
            experiment_dir="./results",
            algorithm="grpo",
            experiment_name="agreed",
            model="tiny",
            swarm_mode=True,
            swarm_mode_sample_collection_method="rollout_until_all_clients_agree_sync_weight",
            batch_size=B,
            num_repeat=N,
            max_env_worker=64,
            max_prompt_length=300,
            max_response_length=500,
            max_response_length_in_one_turn=100,
            max_model_len=800,
            logging="swanlab",
            compute_madness_checklist=["nonsense"],
            timeline_compare_level="token",
        )
        ajet_job.config.ajet.trainer_common.save_freq = 5
        ajet_job.dump_job_as_yaml("results/resolved.yaml")
        swarm_worker = SwarmClient(URL, verbose=False, agentjet_job=ajet_job)
        swarm_worker.auto_sync_train_config_and_start_engine(ajet_job, force_restart=False)
        syncs = []
        swarm_worker.add_entering_weight_sync_callback(lambda: syncs.append(1))

        @retry_with_backoff(max_retry=2)
        def agent(task: Task, api_baseurl_key: OpenaiBaseUrlAndApiKey):
            return execute_agent(task, api_baseurl_key)

        def eval_rollout(task):
            episode_uuid, api = swarm_worker.begin_episode(discard_episode_timeout=120, episode_type="eval")
            try:
                assert swarm_worker.can_continue_episode(episode_uuid)
                return agent(task, api).reward
            finally:
                swarm_worker.abort_episode(episode_uuid)

        def rollout(task):
            policy = SwarmThrottlePolicy(
                ratio=1.0, expected_batch_size=B, expected_num_repeat=N, current_task_id=task.task_id
            )
            episode_uuid, api = swarm_worker.begin_episode(discard_episode_timeout=60, throttle_policy=policy)
            workflow_output = agent(task, api)
            swarm_worker.end_episode(task, episode_uuid, workflow_output)
            return workflow_output.reward

        executor = PeriodicDrainThreadPoolExecutor(workers=N * B, max_parallel=8, auto_retry=True)
        agreed = []
        for n in range(5):
            for _ in range(N):
                _, drained_results = executor.submit_with_periodic_drain(
                    fn=rollout, task=Task(task_id=str(n), main_query=f"question {n}")
                )
                if drained_results:
                    agreed.append((len(drained_results), swarm_worker.agree_sync_weight()))
        executor.shutdown()
        other = SwarmClient(URL)
        other.auto_sync_train_config_and_start_engine(AgentJetJob(model="tiny", batch_size=B, num_repeat=N))
        status, details = other.get_engine_status()
        stat = other.get_rollout_stat()
        print(json.dumps({
            "agreed": agreed,
            "step": swarm_worker.get_global_step(),
            "eval": eval_rollout(Task(main_query="held out")),
            "state": [status, details["engine_status"]],
            "waiting": stat.completed_episodes,
            "folder": swarm_worker.server_experiment_dir() or "mine",
        }))
        """,
    )
    told = last_line(done)
    assert told["agreed"] == [[4, True], [4, True]]
    assert (told["step"], told["waiting"], told["folder"]) == (2, 2, "mine")
    assert told["state"] == ["ENGINE.ROLLING"] * 2
    assert "ajet.experiment_dir has no effect" in done.stderr
    assert "the engine runs another job, and is used as it is:" in done.stderr
    assert (tmp_path / "results/resolved.yaml").is_file()


def test_whoever_forgets_an_episode_holds_no_slot(tmp_path: Path, server: str) -> None:
    done = run(
        tmp_path,
        server,
        """
        import json
        from ajet.tuner_lib.experimental.swarm_client import SwarmClient
        from ajet.utils.thread_executors import BoundedThreadPoolExecutor

        swarm_worker = SwarmClient(URL)
        swarm_worker.auto_sync_train_config_and_start_engine(AgentJetJob(model="tiny", batch_size=1, num_repeat=2))

        def rollout(task):
            try:
                swarm_worker.begin_episode()
                raise ValueError("the agent fails")
            except:
                pass

        executor = BoundedThreadPoolExecutor(max_workers=4)
        for n in range(12):  # of 2 slots
            executor.submit(rollout, Task(main_query=f"{n}"))
        executor.shutdown()
        print(json.dumps(len(swarm_worker.get_episode_buffer())))
        swarm_worker.stop_engine()
        """,
    )
    assert last_line(done) == 0
    with SwarmClient(server) as client:
        assert client.get_engine_status().engine_status is EngineState.OFFLINE


def test_a_dataset_trained_by_one_call_and_two_models_at_once(tmp_path: Path, server: str) -> None:
    done = run(
        tmp_path,
        server,
        """
        import json
        from ajet.tuner_lib.experimental.swarm_client import SwarmClient, auto_train_with_dataset

        pairs = [(SwarmClient(URL), AgentJetJob(model="tiny", batch_size=B, num_repeat=N))]
        SwarmClient.async_and_start_multi_engine(pairs)
        [(swarm_worker, job)] = pairs

        class Dataset:
            def generate_training_tasks(self):
                yield from (Task(main_query=f"question {n}") for n in range(4))

        auto_train_with_dataset(Dataset(), swarm_worker, execute_agent, local_grpo_n=N, remote_batch_size=B)
        print(json.dumps(swarm_worker.get_engine_status()[0]))
        """,
    )
    assert last_line(done) in ("ENGINE.ROLLING", "ENGINE.ROLLING_POST", "ENGINE.WEIGHT_SYNCING")
    with SwarmClient(server) as client:
        wait_for_step(client, 2)


def test_what_cannot_be_handed_in_is_refused_by_name(tmp_path: Path, server: str) -> None:
    done = run(
        tmp_path,
        server,
        """
        import json
        from ajet.tuner_lib.experimental.swarm_client import SwarmClient

        swarm_worker = SwarmClient(URL)
        swarm_worker.auto_sync_train_config_and_start_engine(AgentJetJob(model="tiny", batch_size=B, num_repeat=N))
        told = []
        for task, output, more in (
            (Task(), WorkflowOutput(reward=1.0), {}),
            (Task(main_query="q"), WorkflowOutput(), {}),
            (Task(main_query="q"), WorkflowOutput(reward=[1.0, 2.0]), {}),
            (Task(main_query="q"), WorkflowOutput(reward=1.0), {"declare_client_active": False}),
        ):
            episode_uuid, api = swarm_worker.begin_episode()
            try:
                swarm_worker.end_episode(task, episode_uuid, output, **more)
            except Exception as exc:
                told.append(str(exc))
            swarm_worker.abort_episode(episode_uuid)
        print(json.dumps(told))
        """,
    )
    empty, no_reward, many, inactive = last_line(done)
    assert empty.startswith("the task is empty: give it a task_id")
    assert "reward" in no_reward and "reward" in many
    assert "declare_client_active" in inactive


def test_a_token_is_the_password_in_the_address(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "swarm", "start", "--port", "0", "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "SWARM_TOKEN": "secret/1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].replace("http://", "http://x:secret%2F1@")
        done = run(
            tmp_path,
            url,
            """
            import json
            from ajet.tuner_lib.experimental.swarm_client import SwarmClient

            swarm_worker = SwarmClient(URL)
            print(json.dumps([swarm_worker.get_engine_status()[0], swarm_worker.server_url]))
            """,
            SWARM_TOKEN="",
        )
        state, address = last_line(done)
        assert state == "ENGINE.OFFLINE"
        assert "secret" not in address
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def test_no_server_is_said_in_agentjets_words(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "http://127.0.0.1:1",
        """
        import json
        from swarm.client import RetryPolicy
        from ajet.tuner_lib.experimental.swarm_client import SwarmClient

        RetryPolicy.__init__.__defaults__ = (1, 0.1, 0.1, 1.0)
        print(json.dumps(SwarmClient(URL).get_engine_status()))
        """,
    )
    assert last_line(done) == ["ENGINE.CANNOT_CONNECT", {}]
