"""The trainer's source of batches: announces that vLLM serves, waits for the swarm's batch, queues its rows for verl.

verl calls ``generate_sequences`` (its agent-loop manager interface) and then samples its replay buffer, both from the
trainer's thread; the batch is fetched in the second call, so that an error reaches the training loop as an exception.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from adapters.verl.fields import batch_rows
from adapters.verl.health import HealthWatch, sample_token
from adapters.verl.replicas import VllmDiedError, VllmServers
from swarm.errors import EngineError
from swarm.job import ServingMode
from swarm.link.engine import BatchRequests, EngineEnd
from swarm.link.messages import BatchReady, Resume, Stop, WeightsSynced
from swarm.measures import EVAL
from swarm.tokens import TrainBatch, batch_metrics
from swarm.types import EvalResult

PARTITION = "train"
#: seconds within which the server says that vLLM may go on with new weights
RESUME_SECONDS = 60.0


class StopRequested(Exception):
    """The server told the engine to finish."""


class BatchFeed:
    """One batch per training step.

    Args:
        link: the ``rollout`` end of the engine link.
        model: the name under which vLLM serves the policy.
        serving: when episodes run.
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
        self._replicas: VllmServers | None = None
        self._uids: list[str] = []
        self._stopped = False
        self._step = 0
        self._log: Callable[[Mapping[str, float], int], None] = lambda metrics, step: None
        self._arrived: Callable[[], None] = lambda: None
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
        """Tell the feed where vLLM serves, once it does, where the metrics of a step's weights are logged, and what to
        call when a batch has come."""
        self._replicas = replicas
        self._log = log
        self._arrived = arrived

    def sample_tokens(self) -> None:
        """Have each replica sample a token, before vLLM is said to serve.

        Raises:
            VllmDiedError: one cannot.
        """
        assert self._replicas is not None, "attach() comes first"
        for address in self._replicas.addresses:
            if problem := sample_token(address, self._model):
                raise VllmDiedError(f"vLLM cannot sample: the replica at {address} {problem}")

    def generate_sequences(self, prompts: Any) -> None:
        """Announce a new step; returns at once. ``prompts`` is verl's TensorDict of B place-holders with their uids."""
        assert self._replicas is not None, "attach() comes first"
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
        assert self._replicas is not None
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
        assert self._replicas is not None
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


class SwarmReplayBuffer(ReplayBuffer):
    """verl's replay buffer, which asks the feed for a batch instead of polling for one."""

    def __init__(self, feed: BatchFeed, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._feed = feed

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """The rows of the next batch, of any number of groups; blocks until the swarm has one."""
        groups = self._feed.collect()
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=groups)
