"""What AgentJet's client sends and reads, written from the facts of its public source (none of its code).

It sends no idempotency keys and no token, ignores fields it does not know, refuses types it does not expect, tells
causes apart by phrases, and polls: its waits are divided by :data:`HASTE` here.
"""

from __future__ import annotations

import math
import re
import threading
import time
import uuid
from typing import Any

import httpx
import yaml
from pydantic import BaseModel

HASTE = 200.0
NOT_READY, BUSY, STATUS_POLL, AGREE_AGAIN = 15 / HASTE, 2 / HASTE, 5 / HASTE, 2 / HASTE
SYNCING, POST_ROLLING = "Engine is syncing weights", "Engine is in post-rolling phase"
NO_EPISODES = "No available episodes to claim."


class Claimed(BaseModel):
    success: bool
    client_uuid: str
    episode_uuid: str
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class Done(BaseModel):
    success: bool
    failure_reason: str = ""


class CanContinue(BaseModel):
    can_continue: bool


class EpisodeStatus(BaseModel):
    episode_uuid: str
    episode_status: str = ""
    episode_type: str = "train"
    openai_base_url: str = ""
    openai_api_key: str = ""
    client_uuid: str = ""
    zmq_listen_result_addr: str = ""
    latest_activity_timestamp: float
    discard_episode_timeout: float
    llm_call_count: int = 0
    debug_log: list[str] = []
    optional_task_id: str = ""


class Buffer(BaseModel):
    buffer: list[EpisodeStatus]


class ActiveClient(BaseModel):
    client_uuid: str
    last_activity_at: float
    allowed_sync_weight: bool = False


class Instruction(BaseModel):
    active_clients: list[ActiveClient] = []


class VerboseLogs(BaseModel):
    entries: list[dict[str, Any]] = []


class PoolStat(BaseModel):
    sample_collection_method: str = ""
    completed_episodes: int = 0
    completed_episode_target: int = 0
    completed_tasks: int = 0
    completed_task_target: int = 0
    completed_non_dummy_tasks: int = 0
    completed_non_dummy_task_target: int = 0
    task_expected_num_repeat: int = 0
    completed_tasks_details: dict[str, list[str]] = {}
    completed_tasks_client_uuids: dict[str, list[str]] = {}
    running_episode_details: dict[str, dict[str, str]] | None = None
    engine_status: str | None = None
    global_step: int | None = None
    booting_start_time: float | None = None
    #: a mapping in its model of May 2026: null breaks it
    swarm_client_instruction: Instruction = Instruction()
    training_model_path: str | None = None


class AgentJetClient:
    """One client; ``patience`` bounds in seconds what waits for ever in the original."""

    def __init__(self, url: str, patience: float = 60.0) -> None:
        self.url = url
        self.client_uuid = str(uuid.uuid4())
        self.http = httpx.Client(timeout=60, http2=False, trust_env=False, verify=False)
        self.causes: list[str] = []
        self.warnings: list[str] = []
        self.entered_sync = 0
        self._deadline = time.monotonic() + patience
        self._seen_tasks: list[str] = []
        self._expires: dict[str, float] = {}
        self._cached: tuple[str, dict[str, Any]] | None = None
        self._known = threading.Event()
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def close(self) -> None:
        self._stop.set()
        self._poller.join()
        self.http.close()

    # the engine ---------------------------------------------------------------

    def _poll(self) -> None:
        while not self._stop.wait(0.02):
            answer = self.http.get(f"{self.url}/get_engine_status", timeout=60)
            answer.raise_for_status()
            status = answer.json().get("engine_status", "unknown")
            if status == "ENGINE.WEIGHT_SYNCING" and (self._cached or ("",))[0] != status:
                self.entered_sync += 1
            self._cached = (status, answer.json())
            self._known.set()

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        assert self._known.wait(60)
        assert self._cached is not None
        return self._cached

    def wait_for(self, *wanted: str, poll: float = STATUS_POLL) -> None:
        was_up = False
        while (status := self.get_engine_status()[0]) not in wanted:
            was_up = was_up or status != "ENGINE.OFFLINE"
            assert not (was_up and status == "ENGINE.OFFLINE"), "the engine went offline"
            self._pause(poll)

    def sync_train_config(self, config: dict[str, Any]) -> None:
        text = yaml.safe_dump(config, sort_keys=False)
        self._post("/sync_train_config", {"yaml_as_string": text})

    def start_engine(self) -> None:
        assert self.get_engine_status()[0] == "ENGINE.OFFLINE"
        assert self._post("/start_engine", {}).json()["success"]
        # the cached state may be from before the start
        while self.get_engine_status()[0] == "ENGINE.OFFLINE":
            self._pause(STATUS_POLL)
        self.wait_for("ENGINE.ROLLING")

    def stop_engine(self) -> None:
        assert self._post("/stop_engine", {}).json()["success"]
        self.wait_for("ENGINE.OFFLINE")

    # episodes -----------------------------------------------------------------

    def claim_once(self, episode_type: str, timeout: float, policy: dict[str, Any] | None) -> Claimed:
        body = {
            "client_uuid": self.client_uuid,
            "episode_type": episode_type,
            "discard_episode_timeout": timeout,
            "throttle_policy": policy,
        }
        return Claimed.model_validate(self._post("/claim_episode", body).json())

    def begin_episode(
        self, episode_type: str = "train", timeout: float = 240, policy: dict[str, Any] | None = None
    ) -> Claimed:
        pause = 0.0
        while True:
            self._pause(pause)
            self.wait_for("ENGINE.ROLLING")
            if policy is not None and episode_type == "train" and self.throttled(policy):
                self.causes.append("throttled by the client")
                pause = BUSY
                continue
            claimed = self.claim_once(episode_type, timeout, policy)
            if claimed.success:
                self._expires[claimed.episode_uuid] = time.monotonic() + 8 * timeout
                # whatever host the server thinks it has, the client keeps to the one that it was given
                address = re.sub(r"^https?://[^/]+", self.url, claimed.openai_base_url)
                return claimed.model_copy(update={"openai_base_url": address})
            self.causes.append(claimed.fail_cause)
            pause = BUSY if NO_EPISODES in claimed.fail_cause else NOT_READY

    def throttled(self, policy: dict[str, Any]) -> bool:
        """Its own rule, from what the pool tells: its unique tasks in the batch, without those that others share."""
        stat, task = self.get_rollout_stat(), policy["current_task_id"]
        mine: set[str] = set()
        others: set[str] = set()
        for name, clients in stat.completed_tasks_client_uuids.items():
            mine |= {name} if self.client_uuid in clients else set()
            others |= {name} if set(clients) - {self.client_uuid} else set()
        for one in (stat.running_episode_details or {}).values():
            owner, name = one.get("client_uuid", ""), one.get("optional_task_id", "")
            (mine if owner == self.client_uuid else others).add(name)
        known = task in self._seen_tasks or task in mine or task in others
        full = len({name for name in mine if name} - others) >= policy["expected_batch_size"] * policy["ratio"]
        if known or not full:
            self._seen_tasks.append(task)
            return False
        return True

    def end_episode(self, task_id: str, episode_uuid: str, reward: Any) -> None:
        if self._expires.pop(episode_uuid, 0.0) < time.monotonic():
            self.abort_episode(episode_uuid)
            return
        output = {"reward": reward, "is_success": None, "metadata": {"task_id": task_id}, "log_metrics": {}}
        answer = self.http.post(f"{self.url}/end_episode", json=self._body(episode_uuid, task_id, output))
        if answer.status_code == 400 and "WEIGHT_SYNCING" in str(answer.json().get("detail", "")):
            self.warnings.append(answer.json()["detail"])
            return
        assert Done.model_validate(_checked(answer).json()).success

    def abort_episode(self, episode_uuid: str) -> Done:
        output = {"reward": 0.0, "is_success": None, "metadata": {}, "log_metrics": {}}
        return Done.model_validate(self._post("/abort_episode", self._body(episode_uuid, "", output)).json())

    def can_continue_episode(self, episode_uuid: str) -> bool:
        body = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid}
        return CanContinue.model_validate(self._post("/can_continue_episode", body).json()).can_continue

    def get_episode_buffer(self) -> list[EpisodeStatus]:
        return Buffer.model_validate(self._post("/get_episode_buffer", {}).json()).buffer

    def get_rollout_stat(self) -> PoolStat:
        answer = self.http.get(f"{self.url}/get_current_batch_rollout_pool_information", timeout=60)
        answer.raise_for_status()
        return PoolStat.model_validate(answer.json())

    def server_experiment_dir(self) -> str | None:
        return self.http.get(f"{self.url}/get_server_experiment_dir", timeout=60).json().get("server_experiment_dir")

    def get_verbose_logs(self) -> list[dict[str, Any]]:
        return VerboseLogs.model_validate(
            _checked(self.http.get(f"{self.url}/get_verbose_logs", timeout=60)).json()
        ).entries

    def get_global_step(self) -> int:
        return self.get_engine_status()[1].get("global_step", 0)

    def agree_sync_weight(self, poll: float = STATUS_POLL) -> bool:
        while self.get_engine_status()[0] in ("ENGINE.ROLLING", "ENGINE.ROLLING_POST"):
            answer = Done.model_validate(self._post("/agree_sync_weight", {"client_uuid": self.client_uuid}).json())
            if answer.success:
                self.wait_for("ENGINE.ROLLING_POST", "ENGINE.WEIGHT_SYNCING", poll=poll)
                return True
            self.causes.append(answer.failure_reason)
            self._pause(AGREE_AGAIN)
        return False

    def chat(self, claimed: Claimed, **more: Any) -> dict[str, Any]:
        """As the agent does it, with the key in one header or the other."""
        answer = self.http.post(
            f"{claimed.openai_base_url}/chat/completions",
            json={"model": "whatever the agent says", "messages": [{"role": "user", "content": "hi"}]} | more,
            headers={"authorization": f"Bearer {claimed.openai_api_key}"},
        )
        answer.raise_for_status()
        return answer.json()

    # ---------------------------------------------------------------------------

    def _body(self, episode_uuid: str, task_id: str, output: dict[str, Any]) -> dict[str, Any]:
        return {
            "client_uuid": self.client_uuid,
            "episode_uuid": episode_uuid,
            "workflow_output": output,
            "task_id": task_id,
            "declare_client_active": True,
        }

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return _checked(self.http.post(f"{self.url}{path}", json=body))

    def _pause(self, seconds: float) -> None:
        assert time.monotonic() < self._deadline, f"waited for too long; causes so far: {self.causes[-5:]}"
        time.sleep(seconds)


class AprilClient:
    """The start of the engine as the versions of March and April have it: the state is asked for at most each 0.5 s,
    and an OFFLINE right after the start is an engine that has failed."""

    CACHED = 0.5

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(timeout=60, trust_env=False, verify=False)
        self._asked = -math.inf
        self._status = ""

    def get_engine_status(self) -> str:
        if time.monotonic() - self._asked > self.CACHED:
            self._status = _checked(self.http.get(f"{self.url}/get_engine_status")).json()["engine_status"]
            self._asked = time.monotonic()
        return self._status

    def start_engine(self) -> None:
        assert self.get_engine_status() == "ENGINE.OFFLINE"
        assert _checked(self.http.post(f"{self.url}/start_engine", json={})).json()["success"]
        first = self.get_engine_status()
        while (status := self.get_engine_status()) != "ENGINE.ROLLING":
            assert (first, status) != ("ENGINE.OFFLINE", "ENGINE.OFFLINE"), "the engine did not start"
            time.sleep(STATUS_POLL)


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        raise RuntimeError(f"SwarmClient error {answer.status_code}: {answer.json()}")
    return answer
