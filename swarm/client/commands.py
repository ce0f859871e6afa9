"""What clients do with the engine: wait for its states, start it, and make it run a job or new code.

Invariant: a change of the engine's state is learnt from a long poll that names the last change seen, so there is no
pause in which one could be missed, and a command whose answer was lost is not taken for one that failed.
"""

from __future__ import annotations

import logging

from swarm.client import wire
from swarm.client.claiming import LONG_POLL
from swarm.client.flows import Flow, Flows, Pause
from swarm.errors import ConflictError, EngineError, RequestError, UnavailableError
from swarm.job import TrainJob
from swarm.protocol import ServerStatus
from swarm.states import EngineState

logger = logging.getLogger(__name__)


def wait_for_state(flows: Flows, states: tuple[EngineState, ...], wait_seconds: float) -> Flow[ServerStatus]:
    """Wait until the engine is in one of ``states``.

    Raises:
        EngineError: the engine is OFFLINE and that was not waited for.
        UnavailableError: not within ``wait_seconds``.
    """
    deadline = flows.clock() + wait_seconds
    seen = ""
    change: int | None = None
    rounds = 0
    while True:
        asked = flows.clock()
        poll = min(LONG_POLL, max(0.0, deadline - asked))
        status = yield from flows.perform(wire.wait_status_call(change, poll), deadline=max(deadline, asked))
        engine = status.engine
        doing = " ".join(filter(None, (engine.engine_status, status.boot_stage, engine.engine_status_detail)))
        if doing != seen:
            logger.info("swarm server %s: %s", flows.server_url, doing)
            seen = doing
        if engine.engine_status in states:
            return status
        if engine.engine_status is EngineState.OFFLINE:
            raise EngineError("\n".join([f"the engine is offline: {doing}", *status.last_lines]))
        now = flows.clock()
        if now >= deadline:
            message = f"the engine is not {' or '.join(states)} after {wait_seconds:g} s: {doing}"
            raise UnavailableError(message, code="not_ready")
        changed = status.engine_changes is not None and status.engine_changes != change
        change = status.engine_changes
        rounds = rounds + 1 if not changed and now - asked < poll / 2 else 0
        if rounds:
            # it does not long-poll: a server that stops, or a proxy
            yield Pause(flows.breath(rounds, deadline - now))


def start_engine(flows: Flows, wait_seconds: float) -> Flow[int | None]:
    """Start the engine with the synced job and wait until it is ROLLING; returns its process id."""
    retries: list[None] = []
    try:
        answer = yield from flows.perform(wire.START_ENGINE, on_retry=lambda: retries.append(None))
        pid = answer.pid
    except ConflictError:
        # of a start whose reply was lost, the repetition meets the engine that it started
        status = (yield from flows.perform(wire.STATUS)) if retries else None
        if status is None or status.engine.engine_status is EngineState.OFFLINE:
            raise
        pid = status.engine_pid
    if wait_seconds > 0:
        yield from wait_for_state(flows, (EngineState.ROLLING,), wait_seconds)
    return pid


def ensure_engine(flows: Flows, job: TrainJob, force_restart: bool, wait_seconds: float) -> Flow[None]:
    """Make the engine run ``job``: nothing to do if it rolls with it, wait if it boots or syncs, else start it.

    Raises:
        ConflictError: it runs another job and ``force_restart`` is off; names the fields that differ.
    """
    deadline = flows.clock() + wait_seconds
    status = yield from flows.perform(wire.STATUS)
    if force_restart and status.engine.engine_status is not EngineState.OFFLINE:
        yield from flows.perform(wire.STOP_ENGINE)
        status = yield from wait_for_state(flows, (EngineState.OFFLINE,), deadline - flows.clock())
    if status.engine.engine_status is EngineState.OFFLINE:
        try:
            yield from flows.perform(wire.sync_config_call(job))
            yield from flows.perform(wire.START_ENGINE)
        except RequestError:
            # another client may have started it between our look and our command
            status = yield from flows.perform(wire.STATUS)
            if status.engine.engine_status is EngineState.OFFLINE:
                raise
    if status.engine.engine_status is not EngineState.OFFLINE:
        _refuse_other(job, status)
    # whose job it is that rolls in the end, only the end tells: others may command the engine as well
    status = yield from wait_for_state(flows, (EngineState.ROLLING,), deadline - flows.clock())
    _refuse_other(job, status)


def replace_code(flows: Flows, archive: bytes, force_restart: bool, wait_seconds: float) -> Flow[None]:
    """Hand over a zip of training code; with ``force_restart`` an engine that runs is stopped first and started again.

    Raises:
        ConflictError: the engine is not OFFLINE and ``force_restart`` is off.
    """
    running = False
    if force_restart:
        status = yield from flows.perform(wire.STATUS)
        running = status.engine.engine_status is not EngineState.OFFLINE
        if running:
            yield from flows.perform(wire.STOP_ENGINE)
            yield from wait_for_state(flows, (EngineState.OFFLINE,), wait_seconds)
    yield from flows.perform(wire.sync_code_call(archive))
    if running:
        yield from start_engine(flows, wait_seconds)


def _refuse_other(job: TrainJob, status: ServerStatus) -> None:
    differing = differences(job, status.job) if status.job is not None else []
    if differing:
        raise ConflictError(
            f"the engine runs another job (it differs in {', '.join(differing)}); pass force_restart=True to "
            "replace it, or use the running one as it is",
            code="other_job",
        )


def differences(job: TrainJob, running: TrainJob) -> list[str]:
    """Fields in which two jobs differ. Models are compared by served name: the server may know a resolved path."""
    ours, theirs = (
        {**one.model_dump(exclude={"model", "served_model_name"}), "model": one.model_name} for one in (job, running)
    )
    return [name for name in ours if ours[name] != theirs[name]]
