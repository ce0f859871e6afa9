"""Changes of what the engine runs: code, job, start. One at a time, and each whole or not at all.

Invariant: code and job change only while the engine is OFFLINE. A forced change is checked first, then stops the engine
and starts it again, as after a crash. With other code, or the same job, the training run goes on; a job that differs in
more than ``resume`` begins another: finished episodes that wait and the batch that is out are dropped, and training
starts from the job's model. The answer says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import Callable, Collection
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarm.control_protocol import CodeStatus, ResolvedJob, SyncTrainCodeResponse, SyncTrainConfigResponse
from swarm.errors import ConflictError, NotFoundError, SwarmGatewayError
from swarm.job import Layered, TrainJob, layered, plain_fields, read_fields
from swarm.link.imported import top_level
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.engine.resolving import Resolver
from swarm.server.engine.snapshots import Snapshots, Stored
from swarm.server.engine.supervisor import Supervisor, check_model
from swarm.states import EngineState
from swarm.validation import read_mapping

logger = logging.getLogger(__name__)

#: name by which the server's own code is selected
NO_CODE = "none"
# an import at the top of a module, not in a `try` or a function
_IMPORT = re.compile(rb"^(?:import[ \t]+(\w+)|from[ \t]+(\w+)[\w.]*[ \t]+import\b)", re.MULTILINE)


class Changes:
    """Applies changes.

    Args:
        resolver: resolves jobs into verl's configuration; ``None`` where the engine is not ours: jobs are then taken
            unchecked.
    """

    def __init__(
        self,
        config: ServerConfig,
        controller: Controller,
        supervisor: Supervisor,
        snapshots: Snapshots,
        resolver: Resolver | None,
    ) -> None:
        self._config = config
        #: what the server sets in jobs that leave it open
        self.defaults = read_defaults(config.job_defaults)
        self._controller = controller
        self._supervisor = supervisor
        self._snapshots = snapshots
        self._resolver = resolver
        self._lock = asyncio.Lock()

    # ------------------------------------------------------------------ the engine

    async def start(self) -> int:
        """See :meth:`Supervisor.start`."""
        async with self._lock:
            return await self._supervisor.start()

    async def stop(self) -> None:
        """Stop the engine for good, see :meth:`Supervisor.stop`, after a change in progress, which would start it."""
        async with self._lock:
            await self._supervisor.stop(for_good=True)
            await self._controller.episodes.synced()

    # ------------------------------------------------------------------ code

    async def sync_code(self, archive: bytes, *, force: bool, **sent: str) -> SyncTrainCodeResponse:
        """Select the code in ``archive`` for engines that start from now on; the selected code again changes nothing.
        ``sent`` is as for :meth:`Snapshots.add`.

        Raises:
            RequestError: the archive is refused.
            ConflictError: the engine is not OFFLINE, unless ``force`` restarts it.
            SwarmGatewayError: the disk does not take it (``disk``).
        """
        async with self._lock:
            before = await self._selected()
            # only its content says whether it is other code
            stored = await _stored(partial(self._snapshots.add, archive, **sent))
            changed = before is None or stored.id != before.id
            try:
                restarted = changed and await self._swap(stored.id, force)
            except ConflictError:
                # a forced change may have failed at the engine's start, and the code is selected
                if not force:
                    await _stored(self._snapshots.forget, stored.id)
                raise
            folder = self._snapshots.files(stored.id)
            missing = await asyncio.to_thread(not_installed, folder, stored.files)
        logger.info("code synced to %s: an engine that starts from now on runs it, or does not start", folder)
        return self._answer(stored, changed=changed, restarted=restarted, missing=missing)

    async def select_code(self, snapshot: str | None, *, force: bool) -> SyncTrainCodeResponse:
        """Select an earlier snapshot, or :data:`NO_CODE`; ``None``: the one before the selected one.

        Raises:
            NotFoundError: there is none; or nothing is before the server's own code.
            ConflictError: as for :meth:`sync_code`, or its files are not as they were sent.
        """
        async with self._lock:
            before = await self._selected()
            if snapshot is None:
                snapshot = await self._before(before)
            stored = None if snapshot == NO_CODE else await _stored(self._snapshots.named, snapshot)
            changed = (stored and stored.id) != (before and before.id)
            if changed and stored is not None:
                await _stored(self._snapshots.check, stored)
            restarted = changed and await self._swap(stored and stored.id, force)
        return self._answer(stored, changed=changed, restarted=restarted, missing={})

    async def code(self) -> CodeStatus:
        """What there is."""
        snapshots, selected = await asyncio.to_thread(self._snapshots.all), await self._selected()
        return CodeStatus(
            enabled=self._config.allow_code_sync,
            snapshots=[stored.about for stored in snapshots],
            selected=selected and selected.id,
            running=self._controller.engine.code,
        )

    async def _swap(self, snapshot: str | None, force: bool) -> bool:
        """Select ``snapshot``; whether the engine was restarted for it."""
        return await self._applied("code", force, lambda: _stored(self._snapshots.select, snapshot))

    async def _selected(self) -> Stored | None:
        try:
            return await _stored(self._snapshots.selected)
        except FileNotFoundError:
            return None

    async def _before(self, selected: Stored | None) -> str:
        if selected is None:
            raise NotFoundError(
                "there is nothing to go back from: no synced code is selected, the server's own code is what engines "
                "run. Name the snapshot that they are to run (`swarm-gateway code list`)",
                code="no_snapshot",
            )
        snapshots = [stored.id for stored in await asyncio.to_thread(self._snapshots.all)]
        return max((snapshot for snapshot in snapshots if snapshot < selected.id), default=NO_CODE)

    def _answer(
        self, stored: Stored | None, *, changed: bool, restarted: bool, missing: dict[str, list[str]]
    ) -> SyncTrainCodeResponse:
        if not changed:
            message = "this code is selected already: nothing was changed"
        elif stored is None:
            message = "the next engine runs the server's own code"
        else:
            message = "the next engine imports from this folder first, or does not start"
        if restarted:
            message = message.replace("the next engine", "the engine, which starts again,")
        return SyncTrainCodeResponse(
            success=True,
            temp_ajet_code_path=str(self._snapshots.files(stored.id)) if stored else "",
            message=message,
            snapshot=stored and stored.about,
            changed=changed,
            restarted=restarted,
            not_installed=missing,
        )

    # ------------------------------------------------------------------ the job

    def layers(self, text: str, overrides: dict[str, Any]) -> Layered:
        """The job of YAML text, with ``overrides`` over it and the server's defaults under it.

        Raises:
            ConfigError: names what is wrong.
        """
        return layered(read_fields(text).fields, set_=overrides, server=self.defaults)

    async def resolve(self, layers: Layered) -> ResolvedJob:
        """What an engine would run with the selected code.

        Raises:
            ConfigError: verl has no such key, or another value is wrong.
            ConflictError: this server's engine does not tell.
            EngineError: it cannot be resolved.
        """
        if self._resolver is None:
            raise ConflictError("this server's engine does not resolve its configuration", code="no_resolver")
        selected = await self._selected() if self._config.allow_code_sync else None
        return await self._resolver.resolve(layers, self._snapshots.files(selected.id) if selected else None)

    async def sync_job(
        self, text: str, overrides: dict[str, Any], *, force: bool, from_step: int | None = None
    ) -> SyncTrainConfigResponse:
        """Take a job for the next start; the run goes back to ``from_step``, if one is given.

        Keys of verl that the job names are checked first, as the engine would.

        Raises:
            ConfigError: names what is wrong with it.
            ConflictError: the engine is not OFFLINE, unless ``force`` restarts it.
        """
        read = read_fields(text)
        layers = layered(read.fields, set_=overrides, server=self.defaults)
        check_model(layers.job)
        if layers.overrides and self._resolver is not None:
            await self.resolve(layers)

        new_run = False

        async def apply() -> None:
            nonlocal new_run
            new_run = self._controller.sync_job(layers.job, from_step)
            await self._controller.episodes.synced()

        async with self._lock:
            restarted = await self._applied("configuration", force, apply)
        return SyncTrainConfigResponse(success=True, restarted=restarted, new_run=new_run, ignored=read.ignored)

    async def _applied(self, what: str, force: bool, apply: Callable[[], Any]) -> bool:
        """Await ``apply`` while the engine is OFFLINE; whether it was stopped for that, or had died, and started."""
        engine = self._controller.engine
        if not force:
            engine.check_offline(f"change its {what}, or force a restart")
        if engine.state is EngineState.OFFLINE:
            # what it died of may be what is changed, and then it is forgotten
            restarts = force and engine.failure is not None
            await apply()
            if restarts:
                await self._supervisor.start()
            return restarts
        await self._supervisor.stop()
        try:
            await apply()
        except BaseException:
            # with what there was; the caller learns why the change failed, whatever comes of this
            try:
                await self._supervisor.start()
            except Exception:
                logger.exception("the engine was stopped for a change that failed, and does not start again")
            raise
        await self._supervisor.start()
        return True


async def _stored(work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work`` does on the disk, in a thread."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise SwarmGatewayError(f"the code cannot be stored: {exc.strerror or exc}", code="disk") from exc


def read_defaults(path: Path | None) -> dict[str, Any]:
    """The fields of a job in the server's file of defaults; none without a file.

    Raises:
        ConfigError: it cannot be read.
    """
    return {} if path is None else read_mapping(path, "server's job_defaults")


async def check_job(config: ServerConfig, job: TrainJob) -> None:
    """Refuse a ``job`` that an engine of a server with ``config`` would refuse on this machine, before it is started.

    Raises:
        ConfigError: names what is wrong.
        EngineError: as for :meth:`Resolver.resolve`.
    """
    layers = layered(plain_fields(job, only_set=True), server=read_defaults(config.job_defaults))
    snapshots = Snapshots(config.run_dir)
    code: Path | None = None
    # a server whose selected code is gone says so when it starts an engine
    with contextlib.suppress(FileNotFoundError):
        if config.allow_code_sync and (selected := snapshots.selected()) is not None:
            code = snapshots.files(selected.id)
    await Resolver(config.run_dir).resolve(layers, code, runs_here=True)


def not_installed(folder: Path, names: Collection[str]) -> dict[str, list[str]]:
    """Top-level modules that the Python files ``names`` of ``folder`` import at their top, and that are neither there
    nor installed here, each with the files that do; optional imports, in a ``try``, do not count."""
    importers: dict[str, list[str]] = {}
    provided = {*top_level(folder), *sys.stdlib_module_names}
    for name in sorted(names):
        if name.endswith(".py"):
            with open(f"{folder}/{name}", "rb", buffering=0) as reader:
                text = reader.read()
            for plain, source in _IMPORT.findall(text):
                module = (plain or source).decode()
                # a script imports its neighbours, too
                if module not in provided and not _beside(folder / name, module):
                    importers.setdefault(module, []).append(name)
    return {module: sorted(set(files)) for module, files in importers.items() if not _installed(module)}


def _beside(file: Path, module: str) -> bool:
    return (file.parent / f"{module}.py").exists() or (file.parent / module).is_dir()


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
