"""The trainer's source of batches: announces that vLLM serves, waits for the swarm's batch, queues its rows for verl.

Invariant: every token id, mask bit and log-probability of a timeline arrives in the trainer unchanged.

verl calls ``generate_sequences`` (its agent-loop manager interface) and then samples its replay buffer, both from the
trainer's thread; the batch is fetched in the second call, so that an error reaches the training loop as an exception.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from torch.utils.data import Dataset
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from adapters.verl.causes import VllmDiedError
from adapters.verl.health import HealthWatch, sample_token
from adapters.verl.replicas import VllmServers
from swarm.errors import EngineError
from swarm.job import ServingMode
from swarm.link.engine import BatchRequests, EngineEnd
from swarm.link.messages import BatchReady, Resume, Stop, WeightsSynced
from swarm.measures import EVAL
from swarm.tokens import Timeline, TrainBatch, Trajectory, batch_metrics
from swarm.types import EvalResult

PARTITION = "train"
#: seconds within which the server says that vLLM may go on with new weights
RESUME_SECONDS = 60.0


class SwarmPrompts(Dataset):
    """verl's "dataset": ``total_training_steps * train_batch_size`` empty place-holders, because the real prompts come
    over the link; verl gives each a uid, which names one group."""

    def __init__(self, data_files: Any, tokenizer: Any, processor: Any, config: Any, max_samples: int = -1) -> None:
        self._length = int(data_files[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        # verl's collate function needs one tensor to know the batch size
        return {"raw_prompt": [], "index": index, "dummy_tensor": torch.tensor([index])}


class StopRequested(Exception):
    """The server told the engine to finish."""


class BatchFeed:
    """One batch per training step, from the ``rollout`` end of the engine link.

    Args:
        model: the name under which vLLM serves the policy.
        rollout: verl's configuration of vLLM.
    """

    def __init__(self, link: EngineEnd, model: str, serving: ServingMode, rollout: Any) -> None:
        self._link = link
        self.serves_always = serving == "always"
        #: whether vLLM serves while the trainer computes; elsewhere it gives up its memory meanwhile
        self.stays_awake = not rollout.free_cache_engine
        #: the batches that are asked for and reported
        self.requests = BatchRequests(link, stays_awake=self.stays_awake, serving=serving)
        self._model = model
        self._uids: list[str] = []
        self._stopped = False
        self._step = 0
        #: the latest step that the run has done, see :class:`swarm.link.messages.BatchReady`
        self.newest_step = 0
        #: our metrics of the batch that was collected last
        self.metrics: dict[str, float] = {}
        #: of the batch at hand, by verl's key: the reward of a row's episode, and what its advantage is beside that of
        #: its reward in the group
        self.rewards: dict[str, float] = {}
        self.credits: dict[str, float] = {}

    def attach(
        self,
        replicas: VllmServers,
        log: Callable[[Mapping[str, float], int], None],
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Comes first: tell the feed where vLLM serves, once it does, where the metrics of a step's weights are logged,
        and what to call when a batch has come."""
        self._replicas = replicas
        self._log = log
        self._arrived = arrived

    def sample_tokens(self) -> None:
        """Have each replica sample a token, before vLLM is said to serve.

        Raises:
            VllmDiedError: one cannot.
        """
        for address in self._replicas.addresses:
            if problem := sample_token(address, self._model):
                raise VllmDiedError(f"vLLM cannot sample: the replica at {address} {problem}")

    def generate_sequences(self, prompts: Any) -> None:
        """Announce a new step; returns at once. ``prompts`` is verl's TensorDict of B place-holders with their uids."""
        self._uids = [str(uid) for uid in prompts["uid"]]
        self._step = int(tu.get(prompts, "global_steps"))
        self.requests.ask(self._replicas.addresses, self._model, self._replicas.policy_version(), self._step)

    def collect(self) -> int:
        """Wait for the batch of the announced step and queue its rows; returns how many groups it has.

        Raises:
            StopRequested: the server said Stop instead.
            EngineError: the server is gone.
            VllmDiedError: vLLM is.
            ValueError: a trajectory of the batch holds no sampled token.
        """
        batch = self._wait()
        # the queue answers, or is waited for without an end: its process may have died since the last step
        self._arrived()
        self.metrics = batch_metrics(batch, self._step)
        # verl announced batch_size prompts; how many groups there are is for the collection method to say
        spare = self._uids[len(batch.groups) :]
        if spare:
            tq.kv_clear(partition_id=PARTITION, keys=spare)
        more = (str(uuid.uuid4()) for _ in range(len(batch.groups) - len(self._uids)))
        self.rewards, self.credits = {}, {}
        for rows in batch_rows(batch, [*self._uids[: len(batch.groups)], *more], self._step):
            tq.kv_batch_put(
                keys=rows.keys,
                fields=list_of_dict_to_tensordict(rows.fields),
                tags=rows.tags,
                partition_id=PARTITION,
            )
            self.rewards.update(zip(rows.keys, rows.rewards, strict=True))
            self.credits.update(zip(rows.keys, rows.credits, strict=True))
            tag = {"is_prompt": True, "status": "finished", "global_steps": self._step}
            tq.kv_put(key=rows.uid, partition_id=PARTITION, tag=tag)
        return len(batch.groups)

    def serve_on(self, step: int) -> None:
        """Announce ``step``, which nobody trains any more, and wait for the end.

        Raises:
            StopRequested: always, once the server says Stop.
            EngineError: the server is gone, or vLLM is.
        """
        self.requests.ask(self._replicas.addresses, self._model, self._replicas.policy_version(), step)
        while True:
            self._wait()

    def weights_changed(self, policy_version: int, sampled: dict[str, dict[int, int]]) -> None:
        """Tell the server that vLLM, which is paused, has new weights, and what it had ``sampled`` before; returns when
        the server knows.

        A Stop waits until :meth:`collect`: the step is done, and has yet to be reported.

        Raises:
            EngineError: the server does not answer.
        """
        self._link.send(WeightsSynced(policy_version=policy_version, sampled=sampled))
        deadline = time.monotonic() + RESUME_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not self._link.lost:
            match self._link.receive(timeout=min(left, 1.0)):
                case Resume():
                    return
                case Stop(evaluations=evaluations):
                    self._log_all(evaluations)
                    self._stopped = True
                    return
                case _:
                    pass
        raise EngineError("the swarm server does not answer that it knows of the new weights")

    def _wait(self) -> TrainBatch:
        # no deadline of its own: a swarm may be idle for days. A server that dies is noticed by its heartbeats.
        with HealthWatch(self._replicas.addresses) as watch:
            while not self._link.lost:
                if self._stopped:
                    raise StopRequested
                match self._link.receive(timeout=1.0):
                    case BatchReady() as message if batch := self.requests.take(message):
                        self._log_all(message.evaluations)
                        self.newest_step = message.newest_step
                        return batch
                    case Stop(evaluations=evaluations):
                        self._log_all(evaluations)
                        raise StopRequested
                    case _:
                        pass
                if watch.death:
                    raise VllmDiedError(f"vLLM died: {watch.death}")
        raise EngineError("the swarm server is gone")

    def _log_all(self, evaluations: Sequence[EvalResult]) -> None:
        for evaluation in evaluations:
            self._log({**evaluation.metrics, f"{EVAL}episodes": float(evaluation.episodes)}, evaluation.step)


@dataclass(frozen=True)
class Rows:
    """Rows of one group: ``keys[i]`` is ``{uid}_{session}_{index}``, with its tensors, its tag, and the reward and the
    credit of its episode."""

    uid: str
    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    rewards: list[float]
    credits: list[float]


def batch_rows(batch: TrainBatch, uids: Sequence[str], step: int) -> list[Rows]:
    """The rows of ``batch``, one :class:`Rows` per group, group ``i`` under the trainer's ``uids[i]``.

    Args:
        batch: the groups may have different numbers of trajectories.
        uids: names for the groups of this step, one each.
        step: the training step that consumes the rows.

    Raises:
        ValueError: a trajectory holds no sampled token.
    """
    rows: list[Rows] = []
    for uid, group in zip(uids, batch.groups, strict=True):
        group_rows = Rows(uid, [], [], [], [], [])
        for session, trajectory in enumerate(group.trajectories):
            for index, timeline in enumerate(_sampled(trajectory)):
                group_rows.keys.append(f"{uid}_{session}_{index}")
                group_rows.fields.append(timeline_fields(timeline, uid=uid, reward=trajectory.reward))
                group_rows.tags.append(timeline_tag(timeline, step=step))
                group_rows.rewards.append(trajectory.reward)
                group_rows.credits.append(trajectory.credit)
        rows.append(group_rows)
    return rows


def _sampled(trajectory: Trajectory) -> list[Timeline]:
    # verl reads a trajectory's advantage at the first sampled token of its last timeline; without one it would be 0
    timelines = [timeline for timeline in trajectory.timelines if timeline.sampled_tokens]
    if not timelines:
        raise ValueError(f"episode {trajectory.episode_uuid} has no token that the policy sampled")
    return timelines


def timeline_fields(timeline: Timeline, *, uid: str, reward: float) -> dict[str, Any]:
    """One row of verl's.

    ``prompts`` int64 [P], ``responses`` int64 [R], ``input_ids`` and ``position_ids`` int64 [P+R], ``response_mask``
    and ``loss_mask`` int64 [R], ``rollout_log_probs`` and ``rm_scores`` float32 [R] (the reward on the last token),
    ``policy_versions`` int64 [R] (the training steps whose weights sampled the tokens).
    """
    prompts = torch.tensor(timeline.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(timeline.response_ids, dtype=torch.int64)
    mask = torch.tensor(timeline.response_mask, dtype=torch.int64)
    input_ids = torch.cat([prompts, responses])
    scores = torch.zeros(len(responses), dtype=torch.float32)
    scores[-1] = reward
    return {
        "uid": uid,
        "prompts": prompts,
        "responses": responses,
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(timeline.logprobs, dtype=torch.float32),
        "rm_scores": scores,
        "policy_versions": torch.tensor(timeline.token_versions(), dtype=torch.int64),
        "num_turns": timeline.num_calls,
        # the data plane quarantines conversations that hold anything but text
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": {}},
        "data_source": "swarm",
        "reward_model": {"ground_truth": None},
    }


def timeline_tag(timeline: Timeline, *, step: int) -> dict[str, Any]:
    """The metadata by which verl balances and ages rows; lengths in tokens, versions in training steps."""
    prompt_len, response_len = len(timeline.prompt_ids), len(timeline.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": step,
        "min_global_steps": timeline.min_policy_version,
        "max_global_steps": timeline.max_policy_version,
    }
