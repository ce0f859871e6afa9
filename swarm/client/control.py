"""What both clients can tell the engine and ask about it; the clients inherit it.

Invariant: every command is a flow of :mod:`swarm.client.commands` or one call, so both clients do the very same.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from abc import ABC, abstractmethod
from typing import TextIO, TypeVar

from pydantic import BaseModel

from swarm.client import commands, wire
from swarm.client.flows import Flow, Flows
from swarm.client.report import rollout_lines
from swarm.job import TrainJob
from swarm.protocol import AgreeSyncWeightResponse, BufferedEpisode, EngineStatus, PoolInformation, ServerStatus
from swarm.states import EngineState
from swarm.sync import build_archive

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class EngineControl(ABC):
    """The engine's part of :class:`swarm.client.SwarmClient`."""

    def __init__(self, flows: Flows, boot_timeout: float) -> None:
        self._flows = flows
        self._boot_timeout = boot_timeout

    @abstractmethod
    def _run(self, flow: Flow[T], stopping: threading.Event | None = None) -> T: ...

    @property
    def client_uuid(self) -> str:
        """The name of this client towards the server."""
        return self._flows.client_uuid

    @property
    def server_url(self) -> str:
        """The address of the server."""
        return wire.at_server(self._flows.server_url, "")

    def get_engine_status(self) -> EngineStatus:
        """State of the engine."""
        return self._run(self._flows.perform(wire.ENGINE_STATUS))

    def get_global_step(self) -> int:
        """How many training steps are complete."""
        return self.get_engine_status().global_step

    def get_rollout_stat(self) -> PoolInformation:
        """What the current batch has collected and still needs."""
        return self._run(self._flows.perform(wire.POOL))

    def print_rollout_stat(self, file: TextIO | None = None) -> None:
        """Print :meth:`get_rollout_stat` to ``file`` (default stdout)."""
        print("\n".join(rollout_lines(self.get_rollout_stat())), file=file or sys.stdout)

    def get_episode_buffer(self) -> list[BufferedEpisode]:
        """The episodes that run now."""
        return self._run(self._flows.perform(wire.EPISODE_BUFFER)).buffer

    def status(self) -> ServerStatus:
        """Everything the server tells about itself."""
        return self._run(self._flows.perform(wire.STATUS))

    def wait_for_state(self, *states: EngineState, wait_seconds: float) -> ServerStatus:
        """Wait until the engine is in one of ``states``; one that lasts less than a round trip may be missed.

        Raises:
            EngineError: the engine is OFFLINE and that was not waited for; carries its reason and last lines.
            UnavailableError: the time is over.
        """
        return self._run(commands.wait_for_state(self._flows, states, wait_seconds))

    def agree_sync_weight(self) -> AgreeSyncWeightResponse:
        """Say that this client has no more for the current batch (the ``..._agree_sync_weight`` collection methods);
        the answer says whether that counts."""
        return self._run(self._flows.perform(wire.agree_call(self.client_uuid)))

    def sync_train_config(self, job: TrainJob) -> None:
        """Hand over the job that the next :meth:`start_engine` runs.

        Raises:
            RequestError: the engine is not OFFLINE, or the job is wrong.
        """
        self._run(self._flows.perform(wire.sync_config_call(job)))

    def sync_train_code(self, archive: bytes | str | os.PathLike[str]) -> None:
        """Hand over the training code of the next engine: the bytes of a zip, or its path. Needs the admin scope.

        Raises:
            ConfigError: there is no such file.
            RequestError: the engine is not OFFLINE, the server takes no code, or the archive is wrong.
        """
        self._run(self._flows.perform(wire.sync_code_call(wire.read_archive(archive))))

    def sync_train_code_from_dir(
        self, directory: str | os.PathLike[str], force_restart: bool = False
    ) -> dict[str, str]:
        """The same with the files of a folder that git tracks, as they are in the work tree; with ``force_restart`` an
        engine that runs is stopped before and started again after.

        Returns:
            What of the folder was not sent, and why, by name.

        Raises:
            ConfigError: the folder is in no git checkout or cannot be packed.
            EngineError: the engine that was started again does not run this code, or died while booting.
        """
        archive, left_out = build_archive(directory)
        self._run(commands.replace_code(self._flows, archive, force_restart, self._boot_timeout))
        return left_out

    def start_engine(self, wait: bool = True) -> int | None:
        """Start the engine and, unless told not to, ``wait`` until it is ROLLING; returns its process id.

        Raises:
            RequestError: no job was synced, or it runs already.
            EngineError: it died while booting; carries its reason and last lines.
            UnavailableError: not ROLLING within ``boot_timeout``.
        """
        return self._run(commands.start_engine(self._flows, self._boot_timeout if wait else 0.0))

    def stop_engine(self) -> None:
        """Stop the engine from any state."""
        self._run(self._flows.perform(wire.STOP_ENGINE))

    def auto_sync_train_config_and_start_engine(
        self, job: TrainJob, force_restart: bool = False, *, stopping: threading.Event | None = None
    ) -> None:
        """Make the engine run ``job``: a no-op if it rolls with it, a wait if it boots or syncs, else a start.

        Args:
            stopping: once set, no longer waited for.

        Raises:
            ConflictError: the engine runs another job and ``force_restart`` is off; names the fields that differ.
            EngineError: it died while booting.
            UnavailableError: no server, or not ROLLING within ``boot_timeout``.
        """
        self._run(commands.ensure_engine(self._flows, job, force_restart, self._boot_timeout), stopping)


class AsyncEngineControl(ABC):
    """The engine's part of :class:`swarm.client.AsyncSwarmClient`."""

    def __init__(self, flows: Flows, boot_timeout: float) -> None:
        self._flows = flows
        self._boot_timeout = boot_timeout

    @abstractmethod
    async def _run(self, flow: Flow[T], abandoned: asyncio.Event | None = None) -> T: ...

    @property
    def client_uuid(self) -> str:
        """The name of this client towards the server."""
        return self._flows.client_uuid

    @property
    def server_url(self) -> str:
        """The address of the server."""
        return wire.at_server(self._flows.server_url, "")

    async def get_engine_status(self) -> EngineStatus:
        """State of the engine."""
        return await self._run(self._flows.perform(wire.ENGINE_STATUS))

    async def get_global_step(self) -> int:
        """How many training steps are complete."""
        return (await self.get_engine_status()).global_step

    async def get_rollout_stat(self) -> PoolInformation:
        """What the current batch has collected and still needs."""
        return await self._run(self._flows.perform(wire.POOL))

    async def print_rollout_stat(self, file: TextIO | None = None) -> None:
        """Print :meth:`get_rollout_stat` to ``file`` (default stdout)."""
        print("\n".join(rollout_lines(await self.get_rollout_stat())), file=file or sys.stdout)

    async def get_episode_buffer(self) -> list[BufferedEpisode]:
        """The episodes that run now."""
        return (await self._run(self._flows.perform(wire.EPISODE_BUFFER))).buffer

    async def status(self) -> ServerStatus:
        """Everything the server tells about itself.

        Raises:
            UnavailableError: no server within the policy's bound.
        """
        return await self._run(self._flows.perform(wire.STATUS))

    async def wait_for_state(self, *states: EngineState, wait_seconds: float) -> ServerStatus:
        """Wait until the engine is in one of ``states``; one that lasts less than a round trip may be missed.

        Raises:
            EngineError: the engine is OFFLINE and that was not waited for; carries its reason and last lines.
            UnavailableError: the time is over.
        """
        return await self._run(commands.wait_for_state(self._flows, states, wait_seconds))

    async def agree_sync_weight(self) -> AgreeSyncWeightResponse:
        """Say that this client has no more for the current batch (the ``..._agree_sync_weight`` collection methods);
        the answer says whether that counts."""
        return await self._run(self._flows.perform(wire.agree_call(self.client_uuid)))

    async def sync_train_config(self, job: TrainJob) -> None:
        """Hand over the job that the next :meth:`start_engine` runs.

        Raises:
            RequestError: the engine is not OFFLINE, or the job is wrong.
        """
        await self._run(self._flows.perform(wire.sync_config_call(job)))

    async def sync_train_code(self, archive: bytes | str | os.PathLike[str]) -> None:
        """Hand over the training code of the next engine: the bytes of a zip, or its path. Needs the admin scope.

        Raises:
            ConfigError: there is no such file.
            RequestError: the engine is not OFFLINE, the server takes no code, or the archive is wrong.
        """
        content = await asyncio.to_thread(wire.read_archive, archive)
        await self._run(self._flows.perform(wire.sync_code_call(content)))

    async def sync_train_code_from_dir(
        self, directory: str | os.PathLike[str], force_restart: bool = False
    ) -> dict[str, str]:
        """The same with the files of a folder that git tracks, as they are in the work tree; with ``force_restart`` an
        engine that runs is stopped before and started again after.

        Returns:
            What of the folder was not sent, and why, by name.

        Raises:
            ConfigError: the folder is in no git checkout or cannot be packed.
            EngineError: the engine that was started again does not run this code, or died while booting.
        """
        archive, left_out = await asyncio.to_thread(build_archive, directory)
        await self._run(commands.replace_code(self._flows, archive, force_restart, self._boot_timeout))
        return left_out

    async def start_engine(self, wait: bool = True) -> int | None:
        """Start the engine and, unless told not to, ``wait`` until it is ROLLING; returns its process id.

        Raises:
            RequestError: no job was synced, or it runs already.
            EngineError: it died while booting; carries its reason and last lines.
            UnavailableError: not ROLLING within ``boot_timeout``.
        """
        return await self._run(commands.start_engine(self._flows, self._boot_timeout if wait else 0.0))

    async def stop_engine(self) -> None:
        """Stop the engine from any state."""
        await self._run(self._flows.perform(wire.STOP_ENGINE))

    async def auto_sync_train_config_and_start_engine(self, job: TrainJob, force_restart: bool = False) -> None:
        """Make the engine run ``job``: a no-op if it rolls with it, a wait if it boots or syncs, else a start.

        Raises:
            ConflictError: the engine runs another job and ``force_restart`` is off; names the fields that differ.
            EngineError: it died while booting.
            UnavailableError: no server, or not ROLLING within ``boot_timeout``.
        """
        await self._run(commands.ensure_engine(self._flows, job, force_restart, self._boot_timeout))
