"""The engine's end of the link: one thread owns the socket, so that any thread may send without waiting.

Invariant: ``lost`` is set once the server has been silent for ``server_timeout`` seconds, whatever the process does. A
batch whose step was reported is never taken again, however often the server sends it; each request names the batch
before it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import zmq
from msgspec.structs import replace

from swarm.errors import LinkError
from swarm.job import ServingMode
from swarm.link.messages import (
    BatchReady,
    Heartbeat,
    Hello,
    Message,
    Role,
    RolloutReady,
    StepDone,
    decode,
    encode,
)
from swarm.tokens import TrainBatch
from swarm.types import StepResult

ADDRESS_VARIABLE = "SWARM_LINK_ADDRESS"
TOKEN_VARIABLE = "SWARM_LINK_TOKEN"


class EngineEnd:
    """One engine process on the link; connects and says Hello at construction.

    Args:
        role: which engine process this is.
        address: ``tcp://host:port`` of the server's end.
        token: the secret that the server gave to this engine run.
        heartbeat_interval: seconds between heartbeats sent.
        server_timeout: seconds of silence after which the server counts as lost.
        on_lost: called once, in the link's thread, when the server is lost.
    """

    def __init__(
        self,
        role: Role,
        address: str,
        token: str,
        *,
        heartbeat_interval: float = 1.0,
        server_timeout: float = 10.0,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.role: Role = role
        self._interval = heartbeat_interval
        self._timeout = server_timeout
        self._on_lost = on_lost
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lost = threading.Event()
        self._closing = threading.Event()
        # zmq sockets belong to one thread; a byte on this pair tells it that there is something to send
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._context = zmq.Context()
        self.send(Hello(role=role, token=token, pid=os.getpid()))
        self._thread = threading.Thread(target=self._run, args=(address,), name=f"link-{role}", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(
        cls, role: Role, environ: Mapping[str, str] = os.environ, *, on_lost: Callable[[], None] | None = None
    ) -> Self:
        """Connect with the address and token that the supervisor put into the environment.

        Raises:
            LinkError: this process was not started by a swarm server.
        """
        address, token = environ.get(ADDRESS_VARIABLE), environ.get(TOKEN_VARIABLE)
        if not address or not token:
            raise LinkError(
                f"{ADDRESS_VARIABLE} and {TOKEN_VARIABLE} are not set: the engine is started by the swarm server "
                "(`swarm-gateway swarm start`, then start the engine), not by hand"
            )
        return cls(role, address, token, on_lost=on_lost)

    @property
    def lost(self) -> bool:
        """Whether the server has been silent for too long."""
        return self._lost.is_set()

    def send(self, message: Message) -> None:
        """Queue ``message`` and return at once; messages of one end arrive in order."""
        self._outgoing.put(encode(message))
        # if the pipe is full, the thread has been woken already; if it is closed, nothing is sent any more
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    def receive(self, timeout: float) -> Message | None:
        """The next message of the server, or ``None`` after ``timeout`` seconds (heartbeats are never returned)."""
        try:
            return self._incoming.get(timeout=timeout) if timeout > 0 else self._incoming.get_nowait()
        except queue.Empty:
            return None

    def close(self, timeout: float = 2.0) -> None:
        """Send what is queued, then disconnect; gives up after ``timeout`` seconds. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        # the thread may be awake, see the flag and close its end before this
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")
        self._thread.join(timeout)
        self._wake_write.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, address: str) -> None:
        dealer = self._context.socket(zmq.DEALER)
        # what is queued at close() still goes out, but a dead server holds nobody up
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.connect(address)
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        heard = beat = time.monotonic()
        try:
            while not self._closing.is_set():
                wait = max(0.0, beat + self._interval - time.monotonic())
                ready = dict(poller.poll(round(wait * 1000)))
                if self._wake_read.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                self._flush(dealer)
                if dealer in ready:
                    heard = time.monotonic()
                    self._drain(dealer)
                now = time.monotonic()
                if now - beat >= self._interval:
                    # this thread was held up as well (a frozen machine, a long import): not the server's silence
                    if now - beat > self._timeout / 2:
                        heard = now
                    beat = now
                    dealer.send(encode(Heartbeat()))
                if now - heard > self._timeout and not self._lost.is_set():
                    self._lost.set()
                    if self._on_lost is not None:
                        self._on_lost()
            self._flush(dealer)
        finally:
            dealer.close()
            self._wake_read.close()
            self._context.term()

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = self._outgoing.get_nowait()
            except queue.Empty:
                return
            dealer.send(frame)

    def _drain(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(b"".join(frames))
            except LinkError:
                continue  # a frame that no server of ours sent
            if not isinstance(message, Heartbeat):
                self._incoming.put(message)


class BatchRequests:
    """One trainer's batches, one at a time: it asks for a batch, takes it, and reports its step.

    Args:
        link: the ``rollout`` end of the engine link.
        stays_awake: whether vLLM serves while the trainer computes.
        serving: when episodes run.
    """

    def __init__(self, link: EngineEnd, *, stays_awake: bool = True, serving: ServingMode = "between_steps") -> None:
        self._trained = ""
        self._asked: RolloutReady | None = None
        self._link = link
        self._stays_awake = stays_awake
        self._serving: ServingMode = serving
        #: the batch that the current step trains on; empty before the first
        self.batch_id = ""
        self._reported = ""
        self._received_at = 0.0

    def begin_after(self, batch_id: str) -> None:
        """This trainer began with weights that have learned from batch ``batch_id``, which is not trained again."""
        self._trained = batch_id

    def report_last(self, step: int) -> None:
        """Report ``step``, that of the batch of :meth:`begin_after`: it was the last one, and none is asked for."""
        if self._trained:
            self._link.send(StepDone(result=StepResult(step=step, batch_id=self._trained, metrics={}, seconds=0.0)))

    def ask(self, addresses: Sequence[str], model: str, policy_version: int, next_step: int) -> None:
        """Ask for the batch of ``next_step``; vLLM serves at ``addresses`` with the weights of ``policy_version``.

        It may be repeated while the trainer waits.
        """
        self._asked = RolloutReady(
            addresses=list(addresses),
            model=model,
            policy_version=policy_version,
            next_step=next_step,
            last_batch=self.batch_id,
            stays_awake=self._stays_awake,
            serving=self._serving,
        )
        self._link.send(self._asked)

    def take(self, message: BatchReady) -> TrainBatch | None:
        """The batch to train; ``None`` if its step was reported before.

        An engine that was killed between its checkpoint and its report gets the batch of that step again: the step is
        reported now, and another batch asked for.
        """
        batch = message.batch
        if batch.batch_id == self._reported:
            return None
        self.batch_id, self._received_at = batch.batch_id, time.monotonic()
        if batch.batch_id == self._trained and self._asked is not None:
            self.report(self._asked.next_step - 1, {})
            self._link.send(replace(self._asked, last_batch=self.batch_id))
            return None
        return batch

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the step of the batch that was taken last; its seconds count from the arrival of the batch."""
        seconds = time.monotonic() - self._received_at
        result = StepResult(step=step, batch_id=self.batch_id, metrics=dict(metrics), seconds=seconds)
        self._link.send(StepDone(result=result))
        self._reported = self.batch_id
