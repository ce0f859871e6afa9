"""Drivers of the flows: they carry out requests and pauses, over connections that are kept alive.

Invariant: one request ends within its seconds, however slowly its answer trickles in.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Protocol, TypeVar

import httpx

from swarm.client import wire
from swarm.client.flows import Flow, Pause, Send
from swarm.client.policy import Outcome, Reply
from swarm.errors import StateError, UnavailableError
from swarm.http.client import ConnectionBrokenError, HttpClient

T = TypeVar("T")


class Driver:
    """Runs flows for threads; any number of them at once."""

    def __init__(self) -> None:
        self._http = httpx.Client(limits=wire.LIMITS, trust_env=False, verify=wire.tls_context())
        self._closed = threading.Event()

    def run(self, flow: Flow[T], stopping: threading.Event | None = None) -> T:
        """The result of ``flow``; it is given up before its next step once ``stopping`` is set.

        Raises:
            UnavailableError: ``run_stopped``.
            StateError: the driver is closed.
        """
        outcome: Outcome | None = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as stop:
                return stop.value
            if self._closed.is_set():
                raise StateError("this client is closed")
            check_running(stopping)
            if isinstance(step, Pause):
                outcome = None
                (stopping or self._closed).wait(step.seconds)
                continue
            outcome = self._send(step)

    def close(self) -> None:
        """Close the connections; flows under way end with their next step."""
        self._closed.set()
        self._http.close()

    def _send(self, step: Send) -> Outcome:
        deadline = time.monotonic() + step.seconds
        try:
            with self._http.stream(
                step.method, step.url, headers=step.headers, content=step.content, timeout=step.timeout
            ) as answer:
                content = bytearray()
                for chunk in answer.iter_bytes():
                    content += chunk
                    if time.monotonic() > deadline:
                        return httpx.ReadTimeout(f"the answer took longer than {step.seconds:g} s")
                return Reply(answer.status_code, dict(answer.headers), bytes(content))
        except httpx.RequestError as exc:
            return exc
        except RuntimeError:
            # closed by another thread in this very moment
            if self._closed.is_set():
                return httpx.ReadError("this client is closed")
            raise


class AsyncSender(Protocol):
    """Carries out single requests over connections of its own."""

    async def send(self, step: Send) -> Outcome:
        """The reply within the request's seconds; what went wrong with the connection is returned, not raised."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class HttpxSender:
    """The default; ``transport`` replaces the network, for tests; ``headers`` go with every request."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._http = httpx.AsyncClient(
            transport=transport, headers=headers, limits=wire.LIMITS, trust_env=False, verify=wire.tls_context()
        )

    async def send(self, step: Send) -> Outcome:
        try:
            async with asyncio.timeout(step.seconds):
                answer = await self._http.request(
                    step.method, step.url, headers=step.headers, content=step.content, timeout=step.timeout
                )
            return Reply(answer.status_code, dict(answer.headers), answer.content)
        except httpx.RequestError as exc:
            return exc
        except TimeoutError:
            return httpx.ReadTimeout(f"the answer took longer than {step.seconds:g} s")

    async def close(self) -> None:
        await self._http.aclose()


class HttpSender:
    """Over ``http``, which is closed with it; failures come out as httpx would have named them."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def send(self, step: Send) -> Outcome:
        try:
            async with asyncio.timeout(step.seconds):
                answer = await self._http.request(step.method, step.url, step.content, step.headers)
        except ConnectionBrokenError as exc:
            return (httpx.ConnectError if exc.unsent else httpx.ReadError)(str(exc))
        except TimeoutError:
            return httpx.ReadTimeout(f"the answer took longer than {step.seconds:g} s")
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Reply(answer.status, headers, answer.content)

    async def close(self) -> None:
        await self._http.close()


class AsyncDriver:
    """Runs flows on an event loop; closes ``sender`` with itself."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender
        self._closed = False

    async def run(self, flow: Flow[T], abandoned: asyncio.Event | None = None) -> T:
        """The result of ``flow``; cancelled before its next step once ``abandoned`` is set.

        Raises:
            StateError: the driver is closed.
        """
        outcome: Outcome | None = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as stop:
                return stop.value
            if self._closed:
                raise StateError("this client is closed")
            if abandoned is not None and abandoned.is_set():
                raise asyncio.CancelledError
            if isinstance(step, Pause):
                outcome = None
                await asyncio.sleep(step.seconds)
                continue
            outcome = await self._sender.send(step)

    async def close(self) -> None:
        """Close the connections; flows under way end with their next step."""
        self._closed = True
        await self._sender.close()


def check_running(stopping: threading.Event | None) -> None:
    """Raise if the run that this thread works for is to end.

    Raises:
        UnavailableError: ``run_stopped``.
    """
    if stopping is not None and stopping.is_set():
        raise UnavailableError("the run that this episode is part of is being stopped", code="run_stopped")
