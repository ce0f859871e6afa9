"""``SwarmClient``: the swarm server for threads; a facade over :class:`AsyncSwarmClient` on an event loop in a thread.

Invariant: an episode that fails is aborted, no call waits without a bound, and a closed client leaves nothing running.

A rollout in three lines, the way AgentJet's clients write it::

    episode_uuid, api = client.begin_episode()
    answer = OpenAI(base_url=api.base_url, api_key=api.api_key).chat.completions.create(...)
    client.end_episode(task, episode_uuid, WorkflowOutput(reward=judge(answer)))

or, with the abort built in::

    with client.episode() as episode:
        answer = OpenAI(base_url=episode.base_url, api_key=episode.api_key).chat.completions.create(...)
        episode.end(task, WorkflowOutput(reward=judge(answer)))
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from weakref import WeakSet, finalize

from anyio import to_thread
from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.episodes import AsyncEpisode, AsyncGroup, sweep
from swarm.client.policy import RetryPolicy, attempts_of
from swarm.errors import StateError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import ServerStatus
from swarm.types import Task, WorkflowOutput

P = ParamSpec("P")
T = TypeVar("T")
ItemT = TypeVar("ItemT")
HandleT = TypeVar("HandleT")


class Call(Generic[T]):
    """An asynchronous call that a thread waits for."""

    def __init__(self, portal: BlockingPortal, work: Coroutine[Any, Any, T]) -> None:
        self._portal = portal
        self._task: asyncio.Task[Any] | None = None

        async def run() -> T:
            self._task = asyncio.current_task()
            return await work

        try:
            self._future: Future[T] = portal.start_task_soon(run)
        except RuntimeError as exc:
            work.close()
            raise StateError(f"this client is closed, or called from its own event loop: {exc}") from exc

    def result(self) -> T:
        """What the call returns or raises. An exception that interrupts the wait (Ctrl-C) cancels the call first.

        Raises:
            CancelledError: :meth:`cancel` was called in time.
        """
        try:
            return self._future.result()
        except BaseException:
            if not self._future.done():
                self.cancel()
                wait([self._future])
            raise

    def cancel(self) -> None:
        """Cancel the call; it may still end with a result."""
        with suppress(RuntimeError):  # the loop has ended, and the call with it
            self._portal.start_task_soon(lambda: self._task and self._task.cancel())


class Stopping(threading.Event):
    """Set to end a run of user code: its retries, the claims that its threads wait for, and those to come."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._claims: set[Call[Any]] = set()

    def set(self) -> None:
        """End the run."""
        super().set()
        with self._lock:
            claims = tuple(self._claims)
        for claim in claims:
            claim.cancel()

    def granted(self, claim: Call[T]) -> T:
        """Wait for a claim.

        Raises:
            UnavailableError: ``run_stopped``.
        """
        with self._lock:
            self._claims.add(claim)
        try:
            if self.is_set():
                claim.cancel()
            episodes = claim.result()
        except CancelledError:
            raise _run_stopped() from None
        finally:
            with self._lock:
                self._claims.discard(claim)
        if self.is_set():
            # granted just when the run was stopped: the run aborts it
            raise _run_stopped()
        return episodes


_stopping: ContextVar[Stopping | None] = ContextVar("stopping", default=None)


def _run_stopped() -> UnavailableError:
    return UnavailableError("the run that this episode is part of is being stopped", code="run_stopped")


def _claimed(claim: Call[T]) -> T:
    stopping = _stopping.get()
    return claim.result() if stopping is None else stopping.granted(claim)


@functools.cache
def _portals(pid: int) -> BlockingPortalProvider:
    """The event loop that all clients of a process share; a forked child has a loop of its own."""
    return BlockingPortalProvider()


class _Connection:
    """The asynchronous client behind one :class:`SwarmClient` in one process."""

    def __init__(self, make: Callable[[], AsyncSwarmClient]) -> None:
        self.pid = os.getpid()
        self.client = make()
        self._provider = _portals(self.pid)
        self.portal = self._provider.__enter__()
        self._loop: asyncio.AbstractEventLoop = self.portal.call(asyncio.get_running_loop)
        self._closing = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the client, and end the loop if no other client uses it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            Call(self.portal, self.client.close()).result()
        finally:
            self._provider.__exit__(None, None, None)

    def close_soon(self) -> None:
        """Close the connections without waiting; for a client that was collected, maybe by the loop's own thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self.client.close()))


def blocking(
    method: Callable[Concatenate[AsyncSwarmClient, P], Coroutine[Any, Any, T]], *, claims: bool = False
) -> Callable[Concatenate[SwarmClient, P], T]:
    """The same method for threads; one that ``claims`` ends when the run that it is part of is stopped."""

    @wraps(method)
    def blocked(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        here = self.connection
        call = Call(here.portal, method(here.client, *args, **kwargs))
        return _claimed(call) if claims else call.result()

    return blocked


def managed(
    method: Callable[Concatenate[AsyncSwarmClient, P], AbstractAsyncContextManager[T]],
    handle: Callable[[T, BlockingPortal], HandleT],
) -> Callable[Concatenate[SwarmClient, P], AbstractContextManager[HandleT]]:
    """The same context manager for threads, with a ``handle`` of what it yields."""

    @contextmanager
    @wraps(method)
    def manager(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[HandleT]:
        here = self.connection
        block = method(here.client, *args, **kwargs)
        entered = _claimed(Call(here.portal, block.__aenter__()))
        try:
            yield handle(entered, here.portal)
        finally:
            Call(here.portal, block.__aexit__(None, None, None)).result()

    return manager


class Episode:
    """One claimed episode inside :meth:`SwarmClient.episode`."""

    def __init__(self, inner: AsyncEpisode, portal: BlockingPortal) -> None:
        self.endpoint = inner.endpoint
        self.episode_uuid = inner.episode_uuid
        self.base_url = inner.base_url
        self.api_key = inner.api_key
        self._inner = inner
        self._portal = portal

    @property
    def ended(self) -> bool:
        """Its result was handed in."""
        return self._inner.ended

    def end(self, task: Task | str, workflow_output: WorkflowOutput) -> str:
        """Hand in the result; see :meth:`SwarmClient.end_episode`.

        Raises:
            StateError: it has ended already.
        """
        return Call(self._portal, self._inner.end(task, workflow_output)).result()


class Group:
    """The episodes of one task inside :meth:`SwarmClient.group`."""

    def __init__(self, inner: AsyncGroup, portal: BlockingPortal) -> None:
        self.episodes = inner.episodes
        self.base_url = inner.base_url
        self.api_key = inner.api_key
        self._inner = inner
        self._portal = portal

    @property
    def ended(self) -> bool:
        """Their results were handed in."""
        return self._inner.ended

    def end(self, task: Task | str, outputs: Mapping[str, WorkflowOutput]) -> str:
        """Hand in the results by episode; see :meth:`SwarmClient.end_group`.

        Raises:
            StateError: they have ended already.
        """
        return Call(self._portal, self._inner.end(task, outputs)).result()


def _in_thread(func: Callable[P, object]) -> Callable[P, Coroutine[Any, Any, None]]:
    """``func`` for the event loop: in a daemon thread, where it may block and use the client. Cancelling the call
    leaves the thread to finish."""

    async def call(*args: P.args, **kwargs: P.kwargs) -> None:
        def run() -> None:
            try:
                func(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as exc:
                # it would end the event loop
                raise RuntimeError(f"a callback raised {exc!r}") from exc

        await to_thread.run_sync(run, abandon_on_cancel=True)

    return call


class SwarmClient:
    """Runs episodes and controls the engine of one swarm server; any number of threads may share it.

    Methods behave as those of :class:`AsyncSwarmClient` of the same name. A child process that was forked uses
    connections of its own.

    Args:
        server_url: address of the swarm server, e.g. ``http://127.0.0.1:10086``.
        token: the server's token; default ``$SWARM_TOKEN``.
        client_uuid: name of this client at the server; default a fresh one.
        request_timeout: seconds for one request (a claim: those it waits, and ten more).
        begin_timeout: seconds that :meth:`begin_episode` waits for a free episode: longer than a training step.
        boot_timeout: seconds that starting an engine may take.
        policy: when a request is repeated.
        auto_start_swarm_server: if nothing answers at a loopback address, start a server there and stop it at close.

    Raises:
        ConfigError: ``server_url`` is no http address, or a server cannot be started there.
        UnavailableError: the started server did not come up.
    """

    def __init__(
        self,
        server_url: str,
        token: str | None = None,
        client_uuid: str | None = None,
        *,
        request_timeout: float = 30.0,
        begin_timeout: float = 1800.0,
        boot_timeout: float = 1800.0,
        policy: RetryPolicy | None = None,
        auto_start_swarm_server: bool = False,
    ) -> None:
        self._policy = policy or RetryPolicy()
        self._make = functools.partial(
            AsyncSwarmClient,
            server_url,
            token,
            client_uuid or uuid.uuid4().hex,
            request_timeout=request_timeout,
            begin_timeout=begin_timeout,
            boot_timeout=boot_timeout,
            policy=policy,
            auto_start_swarm_server=auto_start_swarm_server,
        )
        self._connection = _Connection(self._make)
        try:
            Call(self._connection.portal, self._connection.client.__aenter__()).result()
        except BaseException:
            self._connection.close()
            raise
        _open_clients.add(self)
        finalize(self, self._connection.close_soon).atexit = False

    @property
    def connection(self) -> _Connection:
        """The client on the event loop of this process."""
        if self._connection.pid != os.getpid():
            self._connection = _Connection(self._make)
        return self._connection

    @property
    def client_uuid(self) -> str:
        """The name of this client at the server."""
        return self._connection.client.client_uuid

    @property
    def server_url(self) -> str:
        """The address of the server."""
        return self._connection.client.server_url

    # -- episodes

    begin_episode = blocking(AsyncSwarmClient.begin_episode, claims=True)
    end_episode = blocking(AsyncSwarmClient.end_episode)
    can_continue_episode = blocking(AsyncSwarmClient.can_continue_episode)
    claim_group = blocking(AsyncSwarmClient.claim_group, claims=True)
    end_group = blocking(AsyncSwarmClient.end_group)

    episode = managed(AsyncSwarmClient.episode, Episode)
    group = managed(AsyncSwarmClient.group, Group)

    def abort(self, episode_uuids: Iterable[str], reason: str = "", metadata: Mapping[str, Any] | None = None) -> None:
        """See :meth:`AsyncSwarmClient.abort`; does nothing once the client is closed."""
        here = self.connection
        with suppress(StateError):
            Call(here.portal, here.client.abort(tuple(episode_uuids), reason, metadata)).result()

    def abort_episode(self, episode_uuid: str) -> None:
        """Abort one episode, like :meth:`abort`."""
        self.abort([episode_uuid])

    def run_episodes_until_all_complete(
        self,
        tasks: Iterable[ItemT],
        func: Callable[[ItemT], T],
        max_workers: int = 32,
        auto_retry: bool | int = True,
    ) -> list[T | None]:
        """Call ``func(task)`` for each task in threads; episodes it begins and does not end are aborted.

        Args:
            tasks: read as threads come free, so a generator of any length will do. For a GRPO group of N, give each
                task N times.
            func: begins and ends its own episode; what it begins in threads of its own is not tracked.
            max_workers: threads.
            auto_retry: ``True`` tries a task up to three times, a number that many times, ``False`` once.

        Returns:
            What ``func`` returned, in the order of the tasks; ``None`` where it failed for good (logged).

        Raises:
            ExceptionGroup: every task failed.
        """
        stopping = Stopping()

        def run_one(task: ItemT) -> T:
            return self.run_tracked(lambda: func(task), stopping)

        return sweep(tasks, run_one, max_workers, attempts_of(auto_retry), self._policy, stopping)

    def run_tracked(self, func: Callable[[], T], stopping: Stopping | None = None) -> T:
        """Return what ``func`` returns; episodes that it begins and does not end are aborted, and once ``stopping`` is
        set it begins none."""
        token = _stopping.set(stopping)
        try:
            with self.connection.client.open_episodes.run() as left_open:
                try:
                    return func()
                finally:
                    if left_open:
                        self.abort(left_open)
        finally:
            _stopping.reset(token)

    # -- engine

    status = blocking(AsyncSwarmClient.status)
    get_engine_status = blocking(AsyncSwarmClient.get_engine_status)
    get_global_step = blocking(AsyncSwarmClient.get_global_step)
    get_rollout_stat = blocking(AsyncSwarmClient.get_rollout_stat)
    print_rollout_stat = blocking(AsyncSwarmClient.print_rollout_stat)
    get_episode_buffer = blocking(AsyncSwarmClient.get_episode_buffer)
    wait_for_state = blocking(AsyncSwarmClient.wait_for_state)
    agree_sync_weight = blocking(AsyncSwarmClient.agree_sync_weight)
    sync_train_config = blocking(AsyncSwarmClient.sync_train_config)
    sync_train_code = blocking(AsyncSwarmClient.sync_train_code)
    sync_train_code_from_dir = blocking(AsyncSwarmClient.sync_train_code_from_dir)
    start_engine = blocking(AsyncSwarmClient.start_engine)
    stop_engine = blocking(AsyncSwarmClient.stop_engine)
    auto_sync_train_config_and_start_engine = blocking(AsyncSwarmClient.auto_sync_train_config_and_start_engine)

    @staticmethod
    def async_and_start_multi_engine(
        client_job_pairs: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool = False
    ) -> None:
        """:meth:`auto_sync_train_config_and_start_engine` for several servers at once; waits for all.

        Raises:
            ExceptionGroup: some did not start; it names them. The others are left as they are: rolling.
        """
        pairs = [(client.connection.client, job) for client, job in client_job_pairs]
        if pairs:
            portal = client_job_pairs[0][0].connection.portal
            Call(portal, AsyncSwarmClient.async_and_start_multi_engine(pairs, force_restart)).result()

    def add_entering_weight_sync_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in a thread, once for each time that the engine begins to sync weights.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        here = self.connection
        Call(here.portal, here.client.add_entering_weight_sync_callback(_in_thread(callback))).result()

    @contextmanager
    def watching_status(self, on_status: Callable[[ServerStatus], object]) -> Generator[ServerStatus]:
        """Yield the current status; inside the block, call ``on_status`` in a thread with the status after each change
        of the engine's state.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        with _watching(self, _in_thread(on_status)) as first:
            yield first

    # -- plumbing

    def close(self) -> None:
        """End waiting claims and the watch, close the connections, and stop the server if this client started it."""
        _open_clients.discard(self)
        if self._connection.pid == os.getpid():
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


_watching = managed(AsyncSwarmClient.watching_status, lambda first, _: first)
_open_clients: WeakSet[SwarmClient] = WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for client in list(_open_clients):
        with suppress(RuntimeError):  # a server that was started ends with this process anyway
            client.close()
