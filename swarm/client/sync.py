"""``SwarmClient``: the swarm server for threads; a facade over :class:`AsyncSwarmClient` on an event loop in a thread.

Invariant: an episode that fails is aborted, no call waits without a bound, and a closed client leaves nothing running.
"""

from __future__ import annotations

import atexit
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from weakref import WeakSet, finalize

from swarm.client.asynchronous import AsyncSwarmClient
from swarm.client.episodes import AsyncEpisode, AsyncGroup, run_each
from swarm.client.portal import BlockingCall, Connection, each_in_thread, in_thread
from swarm.client.wire import RetryPolicy
from swarm.errors import StateError
from swarm.job import TrainJob
from swarm.status import ServerStatus
from swarm.types import Notes, Task, WorkflowOutput

P = ParamSpec("P")
T = TypeVar("T")
ItemT = TypeVar("ItemT")
HandleT = TypeVar("HandleT")
InnerT = TypeVar("InnerT", AsyncEpisode, AsyncGroup)


def blocking(
    method: Callable[Concatenate[AsyncSwarmClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SwarmClient, P], T]:
    """The same method for threads."""

    @wraps(method)
    def blocked(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        here = self.connection
        return BlockingCall(here, method(here.client, *args, **kwargs)).result()

    return blocked


def managed(
    method: Callable[Concatenate[AsyncSwarmClient, P], AbstractAsyncContextManager[T]],
    handle: Callable[[T, Connection], HandleT],
) -> Callable[Concatenate[SwarmClient, P], AbstractContextManager[HandleT]]:
    """The same context manager for threads, with a ``handle`` of what it yields."""

    @contextmanager
    @wraps(method)
    def manager(self: SwarmClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[HandleT]:
        here = self.connection
        block = method(here.client, *args, **kwargs)
        entered = BlockingCall(here, block.__aenter__()).result()
        try:
            yield handle(entered, here)
        finally:
            BlockingCall(here, block.__aexit__(None, None, None)).result()

    return manager


class _Handle(Generic[InnerT]):
    """``inner`` for threads; attributes and methods as of that."""

    def __init__(self, inner: InnerT, here: Connection) -> None:
        self.base_url = inner.base_url
        self.api_key = inner.api_key
        self._inner = inner
        self._here = here

    @property
    def ended(self) -> bool:
        """The results were handed in."""
        return self._inner.ended


class Episode(_Handle[AsyncEpisode]):
    """One claimed episode inside :meth:`SwarmClient.episode`; see :class:`AsyncEpisode`."""

    def __init__(self, inner: AsyncEpisode, here: Connection) -> None:
        super().__init__(inner, here)
        self.endpoint = inner.endpoint
        self.episode_uuid = inner.episode_uuid

    def end(self, task: Task | str, workflow_output: WorkflowOutput) -> str:
        """See :meth:`AsyncEpisode.end`."""
        return BlockingCall(self._here, self._inner.end(task, workflow_output)).result()


class Group(_Handle[AsyncGroup]):
    """The episodes of one task inside :meth:`SwarmClient.group`; see :class:`AsyncGroup`."""

    def __init__(self, inner: AsyncGroup, here: Connection) -> None:
        super().__init__(inner, here)
        self.episodes = inner.episodes

    def end(self, task: Task | str, outputs: Sequence[WorkflowOutput]) -> str:
        """See :meth:`AsyncGroup.end`."""
        return BlockingCall(self._here, self._inner.end(task, outputs)).result()


class SwarmClient:
    """Runs episodes and controls the engine of one swarm server; any number of threads may share it.

    Methods and arguments are those of :class:`AsyncSwarmClient`, but the constructor starts the server if it is to. A
    forked child process uses connections of its own.

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
        code: str | None = None,
    ) -> None:
        self._policy = policy or RetryPolicy()
        self._make = partial(
            AsyncSwarmClient,
            server_url,
            token,
            client_uuid or uuid.uuid4().hex,
            request_timeout=request_timeout,
            begin_timeout=begin_timeout,
            boot_timeout=boot_timeout,
            policy=policy,
            auto_start_swarm_server=auto_start_swarm_server,
            code=code,
        )
        self._renewing = threading.Lock()
        self._connection = Connection(self._make)
        try:
            BlockingCall(self._connection, self._connection.client.__aenter__()).result()
        except BaseException:
            self._connection.close()
            raise
        _open_clients.add(self)
        if self.started_server:
            _owners.add(self)
        finalize(self, self._connection.close_soon).atexit = False

    @property
    def connection(self) -> Connection:
        """The client on the event loop of this process."""
        if self._connection.pid != os.getpid():
            with self._renewing:
                if self._connection.pid != os.getpid():
                    self._connection = Connection(self._make)
        return self._connection

    @property
    def client_uuid(self) -> str:
        """The name of this client at the server."""
        return self._connection.client.client_uuid

    @property
    def server_url(self) -> str:
        """The address of the server."""
        return self._connection.client.server_url

    @property
    def started_server(self) -> bool:
        """See :attr:`AsyncSwarmClient.started_server`."""
        return self._connection.client.started_server

    # -- episodes

    begin_episode = blocking(AsyncSwarmClient.begin_episode)
    end_episode = blocking(AsyncSwarmClient.end_episode)
    can_continue_episode = blocking(AsyncSwarmClient.can_continue_episode)
    claim_group = blocking(AsyncSwarmClient.claim_group)
    end_group = blocking(AsyncSwarmClient.end_group)

    episode = managed(AsyncSwarmClient.episode, Episode)
    group = managed(AsyncSwarmClient.group, Group)

    def abort(self, episode_uuids: str | Iterable[str], reason: str = "", notes: Notes | None = None) -> None:
        """See :meth:`AsyncSwarmClient.abort`; does nothing once the client is closed."""
        here = self.connection
        with suppress(StateError):
            uuids = episode_uuids if isinstance(episode_uuids, str) else tuple(episode_uuids)
            BlockingCall(here, here.client.abort(uuids, reason, notes)).result()

    def abort_episode(self, episode_uuid: str) -> None:
        """Abort one episode, like :meth:`abort`."""
        self.abort(episode_uuid)

    def run_episodes_until_all_complete(
        self,
        tasks: Iterable[ItemT],
        func: Callable[[ItemT], T],
        max_workers: int = 32,
        auto_retry: bool | int = True,
    ) -> list[T | None]:
        """See :meth:`AsyncSwarmClient.run_episodes_until_all_complete`; ``func`` runs in ``max_workers`` threads.

        What ``func`` begins in threads of its own is not tracked.
        """
        here = self.connection
        work = run_each(
            here.client.run_tracked, each_in_thread(tasks), in_thread(func), max_workers, auto_retry, self._policy
        )
        return BlockingCall(here, work).result()

    # -- engine

    status = blocking(AsyncSwarmClient.status)
    get_engine_status = blocking(AsyncSwarmClient.get_engine_status)
    get_global_step = blocking(AsyncSwarmClient.get_global_step)
    get_rollout_stat = blocking(AsyncSwarmClient.get_rollout_stat)
    print_rollout_stat = blocking(AsyncSwarmClient.print_rollout_stat)
    judged_groups = blocking(AsyncSwarmClient.judged_groups)
    policies = blocking(AsyncSwarmClient.policies)
    explain_policy = blocking(AsyncSwarmClient.explain_policy)
    promote_policy = blocking(AsyncSwarmClient.promote_policy)
    roll_back_policy = blocking(AsyncSwarmClient.roll_back_policy)
    pin_policy = blocking(AsyncSwarmClient.pin_policy)
    resume_training = blocking(AsyncSwarmClient.resume_training)
    kept_policies = blocking(AsyncSwarmClient.kept_policies)
    kept_policy = blocking(AsyncSwarmClient.kept_policy)
    check_answers = blocking(AsyncSwarmClient.check_answers)
    delete_policy = blocking(AsyncSwarmClient.delete_policy)
    data_report = blocking(AsyncSwarmClient.data_report)
    data_delete = blocking(AsyncSwarmClient.data_delete)
    data_export = blocking(AsyncSwarmClient.data_export)
    get_episode_buffer = blocking(AsyncSwarmClient.get_episode_buffer)
    wait_for_state = blocking(AsyncSwarmClient.wait_for_state)
    agree_sync_weight = blocking(AsyncSwarmClient.agree_sync_weight)
    sync_train_config = blocking(AsyncSwarmClient.sync_train_config)
    sync_train_code = blocking(AsyncSwarmClient.sync_train_code)
    sync_train_code_from_dir = blocking(AsyncSwarmClient.sync_train_code_from_dir)
    code = blocking(AsyncSwarmClient.code)
    code_archive = blocking(AsyncSwarmClient.code_archive)
    select_code = blocking(AsyncSwarmClient.select_code)
    resolve_config = blocking(AsyncSwarmClient.resolve_config)
    runs = blocking(AsyncSwarmClient.runs)
    run_record = blocking(AsyncSwarmClient.run_record)
    start_engine = blocking(AsyncSwarmClient.start_engine)
    stop_engine = blocking(AsyncSwarmClient.stop_engine)
    auto_sync_train_config_and_start_engine = blocking(AsyncSwarmClient.auto_sync_train_config_and_start_engine)

    @staticmethod
    def async_and_start_multi_engine(
        client_job_pairs: Sequence[tuple[SwarmClient, TrainJob]], force_restart: bool = False
    ) -> None:
        """See :meth:`AsyncSwarmClient.async_and_start_multi_engine`."""
        pairs = [(client.connection.client, job) for client, job in client_job_pairs]
        if pairs:
            here = client_job_pairs[0][0].connection
            BlockingCall(here, AsyncSwarmClient.async_and_start_multi_engine(pairs, force_restart)).result()

    def add_entering_weight_sync_callback(self, callback: Callable[[], object]) -> None:
        """See :meth:`AsyncSwarmClient.add_entering_weight_sync_callback`; ``callback`` is called in a thread."""
        here = self.connection
        BlockingCall(here, here.client.add_entering_weight_sync_callback(in_thread(callback, abandon=True))).result()

    @contextmanager
    def watching_status(self, on_status: Callable[[ServerStatus], object]) -> Generator[ServerStatus]:
        """See :meth:`AsyncSwarmClient.watching_status`; ``on_status`` is called in a thread."""
        with _watching(self, in_thread(on_status, abandon=True)) as first:
            yield first

    def close(self) -> None:
        """End waiting claims and the watch, close the connections, and stop the server if this client started it."""
        _open_clients.discard(self)
        _owners.discard(self)
        if self._connection.pid == os.getpid():
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_watching = managed(AsyncSwarmClient.watching_status, lambda first, _: first)
_open_clients: WeakSet[SwarmClient] = WeakSet()
#: Those that started their server, which others may use when the last name of one is gone.
_owners: set[SwarmClient] = set()


@atexit.register
def _close_at_exit() -> None:
    for client in list(_open_clients):
        with suppress(RuntimeError):  # a server that was started ends with this process anyway
            client.close()
