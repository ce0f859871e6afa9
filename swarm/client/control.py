"""Job and code of a swarm server's engine: what the engine runs, what it ran, and how to change that.

Invariant: repeating a change is harmless, so a change whose answer was lost is repeated; an engine that ran before a
forced change runs after it.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import BaseModel

from swarm.client import wire
from swarm.client.calls import Calls
from swarm.client.remote_engine import RemoteEngine
from swarm.code_snapshots import build_archive
from swarm.control_protocol import (
    CodeStatus,
    ResolveConfigRequest,
    ResolvedJob,
    RunRecord,
    RunsResponse,
    SelectCodeRequest,
    SyncTrainCodeResponse,
    SyncTrainConfigRequest,
    SyncTrainConfigResponse,
)
from swarm.errors import ConfigError, ConflictError, RequestError
from swarm.job import TrainJob, dump_job, layered
from swarm.protocol import (
    PinPolicyRequest,
    PoliciesResponse,
    PolicyExplanation,
    PolicyStatus,
    PromotePolicyRequest,
    ResumeRequest,
    RollBackPolicyRequest,
)
from swarm.states import EngineState
from swarm.status import DeletePolicyRequest, KeptPoliciesResponse, KeptVersion, PolicyRecord, ServerStatus

#: Seconds that a change may take: it is sent, and the engine may have to stop first; or code that comes back.
_CHANGE_SECONDS = 180.0
#: Seconds that resolving a configuration may take.
_RESOLVE_SECONDS = 90.0


class _Models(BaseModel):
    """Whatever a list of models holds."""


def this_user() -> str:
    """Who sends from where, for the server's log: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class EngineSetup:
    """Job and code of ``engine``; the methods are those of :class:`swarm.client.AsyncSwarmClient`."""

    def __init__(self, calls: Calls, engine: RemoteEngine) -> None:
        self._calls = calls
        self._engine = engine

    @property
    def server_url(self) -> str:
        """The address of the server."""
        return self._calls.server_url

    async def sync_train_config(
        self,
        job: TrainJob | str,
        *,
        set: Mapping[str, Any] | None = None,
        force_restart: bool = False,
        from_step: int | None = None,
    ) -> SyncTrainConfigResponse:
        """Hand over the job that the next :meth:`start_engine` runs; fields that it does not set are the server's.

        Args:
            job: a job, or the YAML text of one, ours or AgentJet's.
            set: wins over the job: its fields, or verl's keys with dots.
            force_restart: stop an engine that runs, and start it again.
            from_step: see :class:`SyncTrainConfigRequest`.

        Returns:
            Whether the engine was restarted, and whether a new training run began, because the job differs.

        Raises:
            RequestError: the engine is not OFFLINE, or the job is wrong.
        """
        body = SyncTrainConfigRequest(
            yaml_as_string=_text(job), set=dict(set or {}), force_restart=force_restart, from_step=from_step
        )
        call = wire.Call(
            "POST", "/sync_train_config", SyncTrainConfigResponse, body, _CHANGE_SECONDS, {"sender": this_user()}
        )
        return await self._changed(call, force_restart)

    async def auto_sync_train_config_and_start_engine(self, job: TrainJob, force_restart: bool = False) -> None:
        """Make the engine run ``job``: do nothing if it rolls with it, wait if it boots or syncs, else start it.

        Raises:
            ConflictError: the engine runs another job and ``force_restart`` is off; names the fields that differ.
            EngineError: it died while booting.
            UnavailableError: no server, or not ROLLING within ``boot_timeout``.
        """
        deadline = monotonic() + self._engine.boot_timeout
        status = await self._calls.status()
        if force_restart and status.engine.engine_status is not EngineState.OFFLINE:
            await self._engine.stop_engine()
            status = await self._engine.wait_for_state(EngineState.OFFLINE, wait_seconds=deadline - monotonic())
        if status.engine.engine_status is EngineState.OFFLINE:
            try:
                await self.sync_train_config(job)
                await self._engine.start_engine(wait=False)
            except RequestError:
                # another client may have started it meanwhile
                status = await self._calls.status()
                if status.engine.engine_status is EngineState.OFFLINE:
                    raise
        if status.engine.engine_status is not EngineState.OFFLINE:
            _refuse_other(job, status)
        # again at the end: other clients may command the engine as well
        status = await self._engine.wait_for_state(EngineState.ROLLING, wait_seconds=deadline - monotonic())
        _refuse_other(job, status)

    async def resolve_config(self, job: TrainJob | str, *, set: Mapping[str, Any] | None = None) -> ResolvedJob:
        """What an engine would run with this job, and where each value comes from; arguments as of
        :meth:`sync_train_config`.

        Raises:
            RequestError: the job is wrong.
        """
        body = ResolveConfigRequest(yaml_as_string=_text(job), set=dict(set or {}))
        return await self._calls.perform(
            wire.Call("POST", "/config/resolve", ResolvedJob, body, timeout=_RESOLVE_SECONDS)
        )

    async def runs(self) -> RunsResponse:
        """The starts of the engine that the server remembers."""
        return await self._calls.perform(wire.Call("GET", "/config", RunsResponse))

    async def run_record(self, number: int) -> RunRecord:
        """What one start ran.

        Raises:
            NotFoundError: the server does not remember it.
        """
        return await self._calls.perform(wire.Call("GET", f"/config/{number}", RunRecord))

    async def sync_train_code(
        self,
        archive: bytes | str | os.PathLike[str],
        *,
        revision: str = "",
        message: str = "",
        force_restart: bool = False,
    ) -> SyncTrainCodeResponse:
        """Hand over the training code of the next engine: the bytes of a zip, or its path. Needs the admin scope.

        Args:
            archive: the zip.
            revision: the commit that the code comes from.
            message: what is new, for people.
            force_restart: stop an engine that runs, and start it again with the same job.

        Raises:
            ConfigError: there is no such file.
            RequestError: the engine is not OFFLINE, the server takes no code, or the archive is wrong.
        """
        if not isinstance(archive, bytes):
            try:
                archive = await asyncio.to_thread(Path(archive).read_bytes)
            except OSError as exc:
                raise ConfigError(f"cannot read the code archive {archive}: {exc.strerror or exc}") from exc
        details = {"sender": this_user(), "revision": revision, "message": message}
        query: dict[str, str | int | float] = {name: value for name, value in details.items() if value}
        if force_restart:
            query["force_restart"] = 1
        call = wire.Call("POST", "/sync_train_code", SyncTrainCodeResponse, archive, _CHANGE_SECONDS, query)
        return await self._changed(call, force_restart)

    async def sync_train_code_from_dir(
        self,
        directory: str | os.PathLike[str],
        force_restart: bool = False,
        *,
        packages: Collection[str] = (),
        message: str = "",
    ) -> dict[str, str]:
        """:meth:`sync_train_code` with the files of a folder that git tracks, as they are in the work tree; waits for
        an engine that it restarted.

        Args:
            directory: holds the packages.
            force_restart: stop an engine that runs, and start it again with the same job.
            packages: at the top of ``directory``; default: all that is in it.
            message: what is new, for people.

        Returns:
            What of the folder was not sent, and why, by name.

        Raises:
            ConfigError: the folder is in no git checkout or cannot be packed.
            EngineError: the restarted engine does not run this code, or died while booting.
        """
        code = await asyncio.to_thread(build_archive, directory, packages=packages)
        done = await self.sync_train_code(
            code.content, revision=code.revision, message=message, force_restart=force_restart
        )
        if done.restarted:
            await self._engine.wait_for_state(EngineState.ROLLING, wait_seconds=self._engine.boot_timeout)
        return code.left_out

    async def code(self) -> CodeStatus:
        """The code that the server has, which is selected, and which the engine runs."""
        return await self._calls.perform(wire.Call("GET", "/code", CodeStatus))

    async def code_archive(self, snapshot: str) -> bytes:
        """The files of one snapshot, as a zip.

        Raises:
            NotFoundError: the server has none of that name.
        """
        call = wire.Call("GET", f"/code/{snapshot}", wire.Content, timeout=_CHANGE_SECONDS)
        return (await self._calls.perform(call)).content

    async def select_code(self, snapshot: str | None = None, *, force_restart: bool = False) -> SyncTrainCodeResponse:
        """Go back to an earlier snapshot: ``none`` for the server's own code, default the one before the selected one.

        Raises:
            NotFoundError: the server has none of that name; or its own code is selected, so there is none before.
            RequestError: the engine is not OFFLINE, and ``force_restart`` is off.
        """
        if snapshot is None:
            # a repetition must not go back twice
            code = await self.code()
            if code.selected is not None:
                snapshot = max((listed.id for listed in code.snapshots if listed.id < code.selected), default="none")
        body = SelectCodeRequest(id=snapshot, force_restart=force_restart)
        query = {"sender": this_user()}
        call = wire.Call("POST", "/code/select", SyncTrainCodeResponse, body, _CHANGE_SECONDS, query)
        return await self._changed(call, force_restart)

    async def policies(self) -> PoliciesResponse:
        """The challengers of the routes behind the server, and what is proven of each."""
        return await self._calls.perform(wire.Call("GET", "/policies", PoliciesResponse))

    async def explain_policy(self, route: str = "", incumbent: str = "") -> PolicyExplanation:
        """One of them, line by line.

        Raises:
            NotFoundError: there is none of that route.
            RequestError: several are meant.
        """
        query = {"of": route, "incumbent": incumbent}
        return await self._calls.perform(wire.Call("GET", "/policies/explain", PolicyExplanation, query=query))

    async def promote_policy(self, wanted: PromotePolicyRequest, sender: str = "") -> PolicyStatus:
        """Let a challenger answer more of the users. Needs the admin scope, as all that moves a stage.

        Args:
            wanted: which, and why; where it says no version, that of the stage now is read first, so that a call that
                is repeated moves it once.
            sender: on whose behalf, for the audit log; empty: this user.

        Raises:
            ConflictError: it moved since ``version``, is live, or nobody is promoted there.
            NotFoundError, RequestError: see :meth:`explain_policy`.
        """
        if wanted.version is None:
            stage = (await self.explain_policy(wanted.route, wanted.incumbent)).stage
            share = stage.rules.after(stage.share) if wanted.share is None and stage.share < 1 else wanted.share
            wanted = wanted.model_copy(update={"share": share, "version": stage.version})
        return await self._command("promote", PolicyStatus, wanted, sender)

    async def roll_back_policy(self, wanted: RollBackPolicyRequest, sender: str = "") -> PolicyStatus:
        """Let the incumbent answer everybody; see :meth:`promote_policy`."""
        return await self._command("rollback", PolicyStatus, wanted, sender)

    async def pin_policy(self, wanted: PinPolicyRequest, sender: str = "") -> PolicyStatus:
        """Let no verdict move a challenger, or let verdicts move it again; see :meth:`promote_policy`."""
        return await self._command("pin", PolicyStatus, wanted, sender)

    async def resume_training(self, reason: str, sender: str = "") -> PoliciesResponse:
        """Let training go on in spite of the alarms that paused it; without any it changes nothing. Needs the admin
        scope; ``sender`` is as in :meth:`promote_policy`."""
        return await self._command("resume", PoliciesResponse, wire.checked(ResumeRequest, {"reason": reason}), sender)

    async def kept_policies(self) -> list[KeptVersion]:
        """The versions whose checkpoints are kept, in the order of their steps."""
        return (await self._calls.perform(wire.Call("GET", "/policies/kept", KeptPoliciesResponse))).versions

    async def kept_policy(self, step: int) -> PolicyRecord:
        """What made one version, and what was proven of it.

        Raises:
            NotFoundError: it is not kept, and was not trained.
        """
        return await self._calls.perform(wire.Call("GET", f"/policies/kept/{step}", PolicyRecord))

    async def check_answers(self, version: int) -> None:
        """Have the engine answer with a kept version beside the newest, at ``/kept/VERSION/v1`` of the server.

        Raises:
            UnavailableError: it does not; ``version_not_kept``: it cannot, as the version's adapter is.
            NotFoundError: the job trains no adapter.
        """
        await self._calls.perform(wire.Call("GET", f"/kept/{version}/v1/models", _Models))

    async def delete_policy(self, step: int, reason: str, sender: str = "") -> KeptVersion:
        """Remove the checkpoint of a version. Needs the admin scope; ``sender`` is as in :meth:`promote_policy`.

        Raises:
            ConflictError: the run goes on from it, or it is promoted or pinned.
            NotFoundError: it is not kept.
        """
        wanted = wire.checked(DeletePolicyRequest, {"step": step, "reason": reason})
        return await self._command("delete", KeptVersion, wanted, sender)

    async def _command(self, what: str, answer: type[wire.AnswerT], wanted: BaseModel, sender: str) -> wire.AnswerT:
        """A command below ``/policies``."""
        query = {"sender": sender or this_user()}
        return await self._calls.perform(wire.Call("POST", f"/policies/{what}", answer, wanted, query=query))

    async def _changed(self, call: wire.Call[wire.AnswerT], force_restart: bool) -> wire.AnswerT:
        """The answer to a change; if the server died in the middle of a restart, the engine is started here."""
        ran = force_restart and (await self._calls.status()).engine.engine_status is not EngineState.OFFLINE
        retries: list[None] = []
        answer = await self._calls.perform(call, on_retry=lambda: retries.append(None))
        if ran and retries and (await self._calls.status()).engine.engine_status is EngineState.OFFLINE:
            try:
                await self._engine.start_engine(wait=False)
            except ConflictError:
                # whoever watches over the engine may have started it first
                if (await self._calls.status()).engine.engine_status is EngineState.OFFLINE:
                    raise
            if isinstance(answer, SyncTrainCodeResponse | SyncTrainConfigResponse):
                return answer.model_copy(update={"restarted": True})
        return answer


async def start_engines(pairs: Sequence[tuple[EngineSetup, TrainJob]], force_restart: bool) -> None:
    """See :meth:`swarm.client.AsyncSwarmClient.async_and_start_multi_engine`."""
    starts = [setup.auto_sync_train_config_and_start_engine(job, force_restart) for setup, job in pairs]
    failed: dict[str, Exception] = {}
    for (setup, _), error in zip(pairs, await asyncio.gather(*starts, return_exceptions=True), strict=True):
        if isinstance(error, Exception):
            error.add_note(f"this is the swarm server {setup.server_url}")
            failed[setup.server_url] = error
        elif error is not None:
            raise error
    if failed:
        urls = ", ".join(failed)
        raise ExceptionGroup(f"{len(failed)} of {len(starts)} engines did not start: {urls}", list(failed.values()))


def _text(job: TrainJob | str) -> str:
    return job if isinstance(job, str) else dump_job(job, only_set=True)


def _refuse_other(job: TrainJob, status: ServerStatus) -> None:
    if status.job is None:
        return
    fields = job.model_dump(exclude_unset=True)
    differing = differences(layered(fields, server=status.job_defaults).job, status.job)
    if differing:
        raise ConflictError(
            f"the engine runs another job (it differs in {', '.join(differing)}); pass force_restart=True to "
            "replace it, or use the running one as it is",
            code="other_job",
        )


def differences(job: TrainJob, running: TrainJob) -> list[str]:
    """Fields in which two jobs differ. Models are compared by served name: the server may know a resolved path."""
    ours, theirs = (
        {**either.model_dump(exclude={"model", "served_model_name"}), "model": either.model_name}
        for either in (job, running)
    )
    return [name for name in ours if ours[name] != theirs[name]]
