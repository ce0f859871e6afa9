"""The trainer's requests for batches: it asks for a batch, takes it, and reports its step.

Invariant: a batch whose step was reported is never taken again, however often the server sends it; each request names
the batch before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from swarm.job import ServingMode
from swarm.link.messages import BatchReady, Message, RolloutReady, StepDone
from swarm.tokens import TrainBatch
from swarm.types import StepResult


class Sender(Protocol):
    """The part of :class:`~swarm.link.engine.EngineEnd` that is used here."""

    def send(self, message: Message) -> None: ...


class BatchRequests:
    """One trainer's batches, one at a time.

    Args:
        link: the ``rollout`` end of the engine link.
        stays_awake: whether vLLM serves while the trainer computes.
        serving: when episodes run.
    """

    def __init__(self, link: Sender, *, stays_awake: bool = True, serving: ServingMode = "between_steps") -> None:
        self._link = link
        self._stays_awake = stays_awake
        self._serving: ServingMode = serving
        self._got = ""
        self._reported = ""
        self._received_at = 0.0

    @property
    def batch_id(self) -> str:
        """The batch that the current step trains on; empty before the first."""
        return self._got

    def ask(self, addresses: Sequence[str], model: str, policy_version: int, next_step: int) -> None:
        """Ask for the batch of ``next_step``; vLLM serves at ``addresses`` with the weights of ``policy_version``.

        It may be repeated while the trainer waits.
        """
        self._link.send(
            RolloutReady(
                addresses=list(addresses),
                model=model,
                policy_version=policy_version,
                next_step=next_step,
                last_batch=self._got,
                stays_awake=self._stays_awake,
                serving=self._serving,
            )
        )

    def take(self, message: BatchReady) -> TrainBatch | None:
        """The batch to train; ``None`` if its step was reported before."""
        batch = message.batch
        if batch.batch_id == self._reported:
            return None
        self._got, self._received_at = batch.batch_id, time.monotonic()
        return batch

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the step of the batch that was taken last; its seconds count from the arrival of the batch."""
        seconds = time.monotonic() - self._received_at
        result = StepResult(step=step, batch_id=self._got, metrics=dict(metrics), seconds=seconds)
        self._link.send(StepDone(result=result))
        self._reported = self._got
