"""The server's end of the link: a ROUTER socket on loopback, and the liveness of the engine's processes.

Invariant: nothing from a peer without a valid Hello gets through, and a role that goes silent is reported exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from dataclasses import dataclass
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from swarm.concurrency import Signal, end_tasks
from swarm.errors import LinkError
from swarm.link.messages import Goodbye, Heartbeat, Hello, Message, Role, RolloutReady, decode, encode

logger = logging.getLogger(__name__)

#: seconds of silence that are allowed until the first RolloutReady: an import of torch or vLLM stops a process's other
#: threads for seconds where cores are busy
BOOT_SILENCE = 60.0


@dataclass
class _Peer:
    identity: bytes
    heard: float


class EngineLink:
    """Server end for one engine run; an async context manager that binds a free loopback port.

    Args:
        token: the secret that the engine's processes must present.
        heartbeat_timeout: seconds of silence after which a role that said Hello counts as dead; at least
            :data:`BOOT_SILENCE` until the engine is ready.
    """

    def __init__(self, token: str, heartbeat_timeout: float = 8.0) -> None:
        self._token = token.encode()
        self._timeout = heartbeat_timeout
        self._peers: dict[Role, _Peer] = {}
        self._events: asyncio.Queue[tuple[Role, Message] | LinkError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._connections = 0
        #: at each frame, and when a connection comes or goes
        self._change = Signal()
        #: ``tcp://127.0.0.1:port`` for the engine's environment; empty before the link is entered
        self.address = ""
        self._finished = False
        self._ready = False

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that are connected now."""
        return frozenset(self._peers)

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 500)
        # sending to a peer that is gone must fail, not vanish; and a batch must never be dropped at a high-water mark
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, 0)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._beat(), self._count())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)
        self._monitor.close()
        self._router.close()
        # term() waits for the linger; the event loop need not
        await asyncio.to_thread(self._context.term)

    def forget(self, role: Role) -> None:
        """The process of ``role`` is gone: drop what it may still have sent, and let another one say Hello."""
        self._peers.pop(role, None)
        self._ready = False

    async def receive(self) -> tuple[Role, Message]:
        """The next message with the role that sent it; heartbeats are swallowed.

        Raises:
            LinkError: a role that had said Hello has been silent for too long.
        """
        event = await self._events.get()
        if isinstance(event, LinkError):
            raise event
        return event

    async def last_words(self, seconds: float) -> list[Message]:
        """The messages that were sent and not received yet. Waits ``seconds`` at most for all processes to leave."""

        def read() -> bool:
            # a connection is closed after all that came over it is in the socket's queue
            return not self._connections and not int(self._router.get(zmq.EVENTS)) & zmq.POLLIN

        await self._change.until(read, seconds)
        events = [self._events.get_nowait() for _ in range(self._events.qsize())]
        return [event[1] for event in events if not isinstance(event, LinkError)]

    async def send(self, role: Role, message: Message) -> None:
        """Send ``message`` to the process of ``role``.

        Raises:
            LinkError: no such process is connected.
        """
        peer = self._peers.get(role)
        if peer is None:
            raise LinkError(f"the engine's {role} process is not connected")
        # a batch has megabytes: packing it here would delay every request of this server
        frame = await asyncio.to_thread(encode, message)
        try:
            await self._router.send_multipart([peer.identity, frame])
        except zmq.ZMQError as exc:
            raise LinkError(f"the engine's {role} process is gone: {exc}") from exc

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frames = await self._router.recv_multipart()
            self._change.notify()
            if len(frames) != 2:
                logger.warning("engine link: dropped a message of %d frames", len(frames))
                continue
            identity, frame = frames
            try:
                message = decode(frame)
            except LinkError as exc:
                logger.warning("engine link: dropped a frame: %s", str(exc).splitlines()[0])
                continue
            if isinstance(message, Hello):
                self._greet(identity, message, loop.time())
                continue
            for role, peer in self._peers.items():
                if peer.identity == identity:
                    peer.heard = loop.time()
                    self._deliver(role, message)
                    break

    async def _count(self) -> None:
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            self._connections += 1 if event == zmq.EVENT_ACCEPTED else -1
            self._change.notify()

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._token):
            logger.warning("engine link: dropped a Hello of pid %d with a wrong token", hello.pid)
            return
        peer = self._peers.get(hello.role)
        if peer is not None and peer.identity != identity:
            logger.warning("engine link: dropped a second %s (pid %d)", hello.role, hello.pid)
            return
        self._peers[hello.role] = _Peer(identity, now)
        self._events.put_nowait((hello.role, hello))

    def _deliver(self, role: Role, message: Message) -> None:
        if isinstance(message, Heartbeat):
            return
        # an engine that said goodbye is expected to go silent
        self._finished = self._finished or isinstance(message, Goodbye)
        self._ready = self._ready or isinstance(message, RolloutReady)
        self._events.put_nowait((role, message))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        interval = min(1.0, self._timeout / 5)
        frame = encode(Heartbeat())
        last = next_beat = loop.time()
        while True:
            # whichever comes first: a role's deadline, so that its silence is noticed then and not a beat later
            allowed = self._timeout if self._ready else max(self._timeout, BOOT_SILENCE)
            deadlines = [peer.heard + allowed for peer in self._peers.values()]
            await asyncio.sleep(max(0.0, min([next_beat, *deadlines]) - loop.time()))
            now = loop.time()
            # our own loop was held up: the silence is ours, not theirs
            if now - last > self._timeout / 2:
                for peer in self._peers.values():
                    peer.heard = max(peer.heard, now - self._timeout / 2)
            last = now
            for role, peer in list(self._peers.items()):
                silence = now - peer.heard
                if silence >= allowed:
                    del self._peers[role]
                    if not self._finished:
                        self._events.put_nowait(LinkError(f"{role} has been silent for {silence:.1f} s"))
            if now < next_beat:
                continue
            next_beat = now + interval
            for peer in list(self._peers.values()):
                with contextlib.suppress(zmq.ZMQError):
                    await self._router.send_multipart([peer.identity, frame])
