"""The head of a swarm server's page: its engine, the batch that fills, and whatever stands in the way.

Invariant: states and warnings are told by words and signs, colour only repeats them.
"""

from __future__ import annotations

from textual.content import Content

from gateway.cli.status import printable
from gateway.tui.asking import Trouble
from gateway.tui.words import UNKNOWN, bar, number, seconds, share, short, size
from swarm.job import TrainJob
from swarm.protocol import PoolInformation, ServerStatus
from swarm.states import EngineState

GOOD, WARNING, BAD, DIM = "$text-success", "bold $text-warning", "bold $text-error", "dim"

#: sign, style
_STATES: dict[EngineState, tuple[str, str]] = {
    EngineState.OFFLINE: ("○", BAD),
    EngineState.BOOTING: ("◔", WARNING),
    EngineState.ROLLING: ("●", "bold $text-success"),
    EngineState.ROLLING_POST: ("◕", "bold $text-accent"),
    EngineState.WEIGHT_SYNCING: ("◆", "bold $text-accent"),
}
_MEANINGS = {
    EngineState.OFFLINE: "no claims, no training",
    EngineState.BOOTING: "claims wait until it rolls",
    EngineState.ROLLING: "episodes are claimed and run",
    EngineState.ROLLING_POST: "the batch is complete; what runs may finish",
    EngineState.WEIGHT_SYNCING: "training, then new weights; claims wait",
}
_BAR = 12
#: Seconds after which a status that is due every second is called old.
_OLD = 5.0


def state_words(state: EngineState) -> tuple[str, str]:
    """``● ROLLING`` and its style."""
    sign, style = _STATES[state]
    return f"{sign} {state.removeprefix('ENGINE.')}", style


def freshness(age: float | None) -> tuple[str, str]:
    """How old what is shown is, and its style."""
    if age is None:
        return "nothing heard yet", WARNING
    return f"as of {seconds(age)} ago", WARNING if age > _OLD else DIM


def trouble_lines(trouble: Trouble | None, next_try: float, age: float | None) -> list[Content]:
    """Why there is no news, what to do, and what becomes of it; nothing while all is well."""
    if trouble is None:
        return []
    again = f"asked again in {seconds(next_try)}" if next_try > 0 else "being asked again"
    old = f"; what stands below is {seconds(age)} old" if age is not None else ""
    return [Content.styled(f"! {trouble.why.value.upper()}: {printable(trouble.words)}; {again}{old}", BAD)]


def head_lines(status: ServerStatus, fresh: tuple[str, str], brief: bool) -> list[Content]:
    """The engine and the batch; ``brief`` leaves out what is as it should be."""
    engine = status.engine
    words, style = state_words(engine.engine_status)
    lines = [
        Content.assemble(
            (words, style),
            f" for {seconds(status.engine_seconds)}"
            + ("" if brief else f" ({_MEANINGS[engine.engine_status]})")
            + f", policy version {engine.global_step}  ",
            fresh,
        )
    ]
    if detail := _detail(status):
        lines.append(labelled("why" if engine.engine_status is EngineState.OFFLINE else "doing", detail))
    if status.engine_failure is not None:
        lines.append(died(status.engine_failure.count, status.engine_failure.reason))
    if status.pool is not None:
        lines.append(labelled("batch", _batch(status, status.pool)))
        lines.append(labelled("pool", _pool(status, status.pool)))
    lines += _waits(status, brief) + _pace(status, brief) + _disk(status, brief) + _replicas(status, brief)
    if not brief:
        lines.append(labelled("model", _model(status)))
    return lines


def progress(pool: PoolInformation, job: TrainJob | None) -> tuple[int, int, str]:
    """How far the next batch is: done, of how many (0: there is no such number), and both in words."""
    method = job.collection if job is not None else "finish_enough_tasks"
    if method == "finish_enough_episodes":
        total = pool.batch_size * pool.num_repeat
        return pool.completed_episodes, total, f"{pool.completed_episodes}/{total} episodes"
    if method in ("any_client_agree_sync_weight", "all_clients_agree_sync_weight"):
        return 0, 0, f"{len(pool.tasks)} tasks wait for agreement"
    return pool.completed_tasks, pool.batch_size, f"{pool.completed_tasks}/{pool.batch_size} tasks"


def died(count: int, reason: str) -> Content:
    """What the engine died of the last time, and how often in a row."""
    return labelled("died", f"{printable(reason)} ({count} in a row without a step)", WARNING)


def labelled(label: str, text: str | Content, style: str = "") -> Content:
    """A line of a head, of a server of either kind."""
    return Content.assemble((f"{label:<6} ", DIM), text if isinstance(text, Content) else (text, style))


def _detail(status: ServerStatus) -> str:
    detail = status.engine.engine_status_detail
    stage = status.boot_stage if status.boot_stage not in detail else ""
    if status.engine.engine_status is not EngineState.BOOTING:
        stage = ""
    return printable(" ".join(part for part in (stage, detail) if part))


def _batch(status: ServerStatus, pool: PoolInformation) -> str:
    done, total, words = progress(pool, status.job)
    if not total:
        taking_part = [client for client in status.clients if client.agreed or (client.active and client.takes_part)]
        agreed = sum(client.agreed for client in taking_part)
        return f"{words}: {agreed} of {len(taking_part)} clients agree; {pool.completed_episodes} episodes wait"
    begun = sum(count < pool.num_repeat for count in pool.tasks.values())
    return (
        f"{bar(done, total, _BAR)} {words} ({share(done, total)}) for step {status.engine.global_step + 1}; {begun} "
        f"begun, {pool.completed_episodes} episodes wait"
    )


def _pool(status: ServerStatus, pool: PoolInformation) -> str:
    in_flight = sum(episode.in_flight for episode in status.running)
    parts = [
        f"{pool.running_episodes} of {pool.slots} slots run, {in_flight} calls in flight",
        f"{number(pool.trained_episodes)} trained",
    ]
    parts += [f"{number(pool.dropped_episodes)} dropped"] if pool.dropped_episodes else []
    parts += [f"{number(pool.quarantined_episodes)} quarantined"] if pool.quarantined_episodes else []
    return "; ".join([parts[0], ", ".join(parts[1:]) + " in this run"])


def _waits(status: ServerStatus, brief: bool) -> list[Content]:
    if not status.waiting_claims:
        return [] if brief else [labelled("waits", "no claim waits")]
    text = f"{status.waiting_claims} claims wait, the longest for {seconds(status.longest_wait_seconds)}"
    return [labelled("waits", text, WARNING if status.longest_wait_seconds > 60 else "")]


def _pace(status: ServerStatus, brief: bool) -> list[Content]:
    rates = status.rates
    if rates is None:
        return []
    return [
        labelled(
            "pace",
            f"{rates.episodes_per_minute:.0f} episodes/min, {rates.claims_per_minute:.0f} claims/min, "
            f"{number(rates.sampled_tokens_per_second)} tokens/s sampled, {number(rates.trained_tokens_per_second)} "
            f"trained" + ("" if brief else f" (over {rates.window:.0f} s)"),
        )
    ]


def _disk(status: ServerStatus, brief: bool) -> list[Content]:
    journal = status.journal
    if journal is None:
        return []
    if journal.error:
        return [labelled("disk", f"! {journal.pending} records wait: {printable(journal.error)}", BAD)]
    if journal.oldest_pending_seconds > 1:
        text = f"! {journal.pending} records wait, the oldest for {seconds(journal.oldest_pending_seconds)}"
        return [labelled("disk", text, WARNING)]
    if brief:
        return []
    return [
        labelled(
            "disk",
            f"{journal.pending} records wait; the last commit took {1000 * journal.last_commit_seconds:.1f} ms; "
            f"{number(journal.records)} records in {number(journal.commits)} commits, {size(journal.bytes)}",
        )
    ]


def _replicas(status: ServerStatus, brief: bool) -> list[Content]:
    replicas = status.replicas
    ill = [replica for replica in replicas if not replica.healthy]
    if not replicas or (brief and not ill):
        return []
    text = (
        f"{len(replicas) - len(ill)} of {len(replicas)} replicas answer, {sum(r.in_flight for r in replicas)} in "
        f"flight, {number(sum(r.calls for r in replicas))} calls, {number(sum(r.failures for r in replicas))} failed"
    )
    if ill:
        text = f"! {text}; set aside: {', '.join(short(replica.address, 40) for replica in ill[:4])}"
    return [labelled("vLLM", text, BAD if ill else "")]


def _model(status: ServerStatus) -> str:
    job = status.job
    parts = [short(status.model, 60) or UNKNOWN]
    if job is not None:
        parts.append(f"{job.batch_size} tasks of {job.num_repeat} answers, collected by {job.collection}")
    parts.append(f"{status.weight_syncs} weight syncs")
    if status.engine_pid is not None:
        parts.append(f"process {status.engine_pid}")
    return ", ".join(parts)
