"""What the monitor shows of a swarm server's status: its engine, the batch that fills, and what holds it up.

Invariant: words and signs show states and warnings; colour only repeats them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.filesize import decimal

from gateway.views.format import (
    ACCENT,
    BAD,
    DIM,
    GOOD,
    UNKNOWN,
    WARNING,
    Columns,
    Line,
    Row,
    Table,
    View,
    bar,
    counts_table,
    curve,
    measure,
    number,
    percent,
    printable,
    seconds,
    short,
    table_of,
)
from swarm.evidence.alarms import Alarm
from swarm.measures import (
    CALLS,
    EVAL_REWARD,
    EVAL_SUCCESS,
    LOGGED,
    RESPONSE_TOKENS,
    REWARD,
    SPREAD,
    SUCCESS,
    TASKS,
    TASKS_WITH_SIGNAL,
    TRAIN,
)
from swarm.progress import batch_progress, groups_that_differ, reward, share
from swarm.states import EngineState
from swarm.status import ClientRow, PoolInformation, RunningEpisode, ServerStatus
from swarm.types import StepResult

#: Sign, style and meaning of each state.
STATES: dict[EngineState, tuple[str, str, str]] = {
    EngineState.OFFLINE: ("○", BAD, "no claims, no training"),
    EngineState.BOOTING: ("◔", WARNING, "claims wait until it rolls"),
    EngineState.ROLLING: ("●", f"bold {GOOD}", "episodes are claimed and run"),
    EngineState.ROLLING_POST: ("◕", ACCENT, "the batch is complete; what runs may finish"),
    EngineState.WEIGHT_SYNCING: ("◆", ACCENT, "new weights; claims wait"),
}
#: Cells of bars in the overview, in the head, and in the table of tasks.
_OVERVIEW_BAR, _HEAD_BAR, _TASK_BAR = 8, 12, 10


_EPISODES: Columns[RunningEpisode] = {
    "episode": lambda episode: episode.episode_uuid[-8:],
    "client": lambda episode: short(episode.client_uuid, 24),
    ">age": lambda episode: seconds(episode.seconds),
    ">idle": lambda episode: ("! " if _idle_for_long(episode) else "") + seconds(episode.idle_seconds),
    ">calls": lambda episode: str(episode.calls),
    ">now": lambda episode: str(episode.in_flight or ""),
    "task": lambda episode: episode.task_id or UNKNOWN,
    "type": lambda episode: episode.episode_type,
    ">of": lambda episode: seconds(episode.idle_timeout),
    ">left": lambda episode: seconds(episode.seconds_left),
    "note": lambda episode: episode.quarantined,
}
_CLIENTS: Columns[ClientRow] = {
    "client": lambda row: short(row.client_uuid, 24),
    "": lambda row: "● active" if row.active else "○ silent",
    ">run": lambda row: str(row.running),
    ">trained": lambda row: number(row.trained),
    ">dropped": lambda row: number(row.dropped),
    ">timed out": lambda row: number(row.timed_out),
    ">silent": lambda row: seconds(row.idle_seconds),
    "note": lambda row: ", ".join(["throttled"] * row.throttled + ["agreed"] * row.agreed),
    ">ended": lambda row: number(row.ended),
    ">waiting": lambda row: number(row.waiting),
    ">claimed": lambda row: number(row.claimed),
    ">aborted": lambda row: number(row.aborted),
    ">share": lambda row: str(row.groups),
}
_STEPS: Columns[StepResult] = {
    ">step": lambda step: str(step.step),
    ">reward": lambda step: _metric(step, REWARD, reward),
    ">±": lambda step: _metric(step, SPREAD, reward),
    ">groups differ": lambda step: _differ(step),
    ">success": lambda step: _metric(step, SUCCESS, share),
    ">tokens": lambda step: _metric(step, RESPONSE_TOKENS),
    ">calls": lambda step: _metric(step, CALLS),
    ">time": lambda step: seconds(step.seconds),
    ">episodes": lambda step: _metric(step, "swarm/episodes"),
    ">history lost": lambda step: _metric(step, "swarm/lost_history", share),
}
#: Name of a curve -> the metric of a step.
_CURVES = {
    "reward": REWARD,
    "reward spread": SPREAD,
    "success rate": SUCCESS,
    "tokens/answer": RESPONSE_TOKENS,
    "calls/episode": CALLS,
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "KL loss": "actor/kl_loss",
}
#: The same for the metrics of an evaluation.
_EVALUATION_CURVES = {"evaluation reward": EVAL_REWARD, "evaluation success": EVAL_SUCCESS}
#: Cells of a curve and of its title; larger values than this overflow in differences.
_CURVE, _TITLE, _MAX_VALUE = 24, 24, 1e300
#: Begins the names of what workflows log.
_LOGGED = TRAIN + LOGGED


def view(
    status: ServerStatus,
    steps: Sequence[StepResult],
    episodes_per_minute: Iterable[float] = (),
    tokens_per_second: Iterable[float] = (),
) -> View:
    """Everything of one status and of the steps before it.

    Args:
        status: the last one.
        steps: all known ones, oldest first.
        episodes_per_minute: over time, oldest first.
        tokens_per_second: likewise.
    """
    pool = status.pool
    batch, now = UNKNOWN, UNKNOWN
    if pool is not None:
        done, total, words = batch_progress(pool)
        # the rest is on the server's own page
        batch = f"{bar(done, total, _OVERVIEW_BAR)} {words.partition(',')[0]}" if total else words
        now = f"{pool.running_episodes} run, {status.waiting_claims} claims wait"
    losses = {
        "dropped: finished, or given up, and never trained": status.dropped,
        "quarantined: token ids, log-probabilities and usage disagree": status.quarantined,
        "how episodes ended": status.outcomes,
    }
    busiest = sorted(status.clients, key=lambda row: (not row.active, -row.running, row.idle_seconds))
    logged = dict.fromkeys(name for step in steps for name in step.metrics if name.startswith(_LOGGED))
    curves: dict[str, Iterable[float | None]] = {
        **{name: [step.metrics.get(metric) for step in steps] for name, metric in _CURVES.items()},
        **{
            name: [evaluation.metrics.get(metric) for evaluation in status.evaluations]
            for name, metric in _EVALUATION_CURVES.items()
        },
        **{name: [step.metrics.get(name) for step in steps] for name in logged},
        "seconds/step": [step.seconds for step in steps],
        "episodes/min": episodes_per_minute,
        "tokens/s": tokens_per_second,
    }
    return View(
        state=_state(status),
        version=str(status.engine.global_step),
        batch=batch,
        now=now,
        reward=_reward_cell(steps, status.alarms),
        head=_head(status),
        tables={
            "steps": table_of(_STEPS, reversed(steps), empty="no step is done yet"),
            "curves": Table(("metric", ">last", ">lowest", ">highest", "course"), [*_curve_rows(curves)]),
            "e": _episodes(status),
            "t": _tasks(status),
            "c": table_of(_CLIENTS, busiest, lambda row: "" if row.active else DIM, empty="no client has come"),
            "d": counts_table(("episodes", "why"), losses, "nothing was dropped"),
        },
        last_lines=status.last_lines,
    )


def _episodes(status: ServerStatus) -> Table:
    """Running episodes, in the server's order."""
    listed = len(status.running)
    total = status.pool.running_episodes if status.pool is not None else listed
    return table_of(
        _EPISODES,
        status.running,
        lambda episode: WARNING if _idle_for_long(episode) or episode.quarantined else "",
        f"of {total} the {listed} that have been idle for longest" if total > listed else "",
        "no episode runs",
    )


def _idle_for_long(episode: RunningEpisode) -> bool:
    return episode.idle_seconds > episode.idle_timeout / 2


def _metric(step: StepResult, name: str, form: Callable[[float], str] = measure) -> str:
    return form(step.metrics[name]) if name in step.metrics else UNKNOWN


def _differ(step: StepResult) -> str:
    """``3 of 4``: groups whose rewards differ, of all."""
    differing = groups_that_differ(step.metrics.get(TASKS_WITH_SIGNAL), step.metrics.get(TASKS))
    return differing.partition(" groups")[0] or UNKNOWN


def _curve_rows(curves: Mapping[str, Iterable[float | None]]) -> Iterator[Row]:
    """Last, lowest and highest value of each curve, and its course; without curves that have no values."""
    for name, values in curves.items():
        numbers = [value for value in values if value is not None and abs(value) < _MAX_VALUE]
        if numbers:
            shown = map(reward if "reward" in name else measure, (numbers[-1], min(numbers), max(numbers)))
            title = name.removeprefix(_LOGGED)
            # parts of a reward that begin alike differ at their ends
            title = title if len(title) <= _TITLE else f"…{title[1 - _TITLE :]}"
            yield Row((short(title, _TITLE), *shown, curve(numbers, _CURVE)))


def _state(status: ServerStatus) -> str:
    state = status.engine.engine_status
    return f"{STATES[state][0]} {state.removeprefix('ENGINE.')}"


def _reward_cell(steps: Sequence[StepResult], alarms: Sequence[Alarm]) -> str:
    """Of the last step, for the overview."""
    if not steps or REWARD not in steps[-1].metrics:
        return UNKNOWN
    sign = "! " if alarms else ""
    return f"{sign}{_metric(steps[-1], REWARD, reward)}, {_differ(steps[-1])} differ"


def _head(status: ServerStatus) -> list[Line]:
    engine = status.engine
    _, style, meaning = STATES[engine.engine_status]
    if engine.engine_status is EngineState.BOOTING and status.serving is not None:
        meaning = "another trainer starts; vLLM answers, untrained"
    since = f"for {seconds(status.engine_seconds)} ({meaning}), policy version {engine.global_step}"
    lines = [Line(since, label=_state(status), label_style=style)]
    booting = engine.engine_status is EngineState.BOOTING
    stage = status.boot_stage if booting and status.boot_stage not in engine.engine_status_detail else ""
    if detail := printable(" ".join(part for part in (stage, engine.engine_status_detail) if part)):
        lines.append(Line(detail, label="why" if engine.engine_status is EngineState.OFFLINE else "doing"))
    if status.job is not None and status.job.project.startswith("study-"):
        lines.append(
            Line(printable(f"{status.job.project.removeprefix('study-')}, run {status.job.experiment}"), label="study")
        )
    if status.training_seconds is not None:
        goes_on = "; episodes run on" if status.serving == "always" else "; no episode runs meanwhile"
        lines.append(Line(f"on a batch for {seconds(status.training_seconds)}{goes_on}", label="trains"))
    if failure := status.engine_failure:
        reason = f"{printable(failure.reason)} ({failure.count} in a row without a step)"
        lines.append(Line(reason, WARNING, "died"))
    lines += [Line(f"! {printable(warning)}", WARNING, "warns") for warning in status.warnings[-2:]]
    lines += [Line(f"! {printable(alarm.sentence)}", WARNING, "alarm") for alarm in status.alarms]
    lines += [Line(printable(status.learning), label="trend")] if status.learning else []
    if status.pool is not None:
        lines.append(Line(_batch(status, status.pool), label="batch"))
        lines.append(Line(_slots(status, status.pool), label="pool"))
    waits = f"{status.waiting_claims} claims wait, the longest for {seconds(status.longest_wait_seconds)}"
    late = WARNING if status.longest_wait_seconds > 60 else ""
    lines.append(
        Line(waits, late, "waits") if status.waiting_claims else Line("no claim waits", "", "waits", minor=True)
    )
    if rates := status.rates:
        pace = (
            f"{rates.episodes_per_minute:.0f} episodes/min, {rates.claims_per_minute:.0f} claims/min, "
            f"{number(rates.sampled_tokens_per_second)} tokens/s sampled, {number(rates.trained_tokens_per_second)} "
            f"trained (over {rates.window:.0f} s)"
        )
        lines.append(Line(pace, label="pace"))
    return [*lines, *_disk(status), *_replicas(status), Line(_model(status), label="model", minor=True)]


def _batch(status: ServerStatus, pool: PoolInformation) -> str:
    done, total, words = batch_progress(pool)
    if not total:
        taking_part = [client for client in status.clients if client.agreed or (client.active and client.takes_part)]
        agreed = sum(client.agreed for client in taking_part)
        return f"{words}: {agreed} of {len(taking_part)} clients agree; {pool.completed_episodes} episodes wait"
    begun = sum(count < pool.num_repeat for count in pool.tasks.values())
    return (
        f"{bar(done, total, _HEAD_BAR)} {words} ({percent(done, total)}) for step {status.engine.global_step + 1}; "
        f"{begun} begun, {pool.completed_episodes} episodes wait"
    )


def _slots(status: ServerStatus, pool: PoolInformation) -> str:
    in_flight = sum(episode.in_flight for episode in status.running)
    parts = [f"{number(pool.trained_episodes)} trained"]
    parts += [f"{number(pool.dropped_episodes)} dropped"] if pool.dropped_episodes else []
    parts += [f"{number(pool.quarantined_episodes)} quarantined"] if pool.quarantined_episodes else []
    slots = f"{pool.running_episodes} of {pool.slots} slots run, {in_flight} calls in flight"
    return f"{slots}; {', '.join(parts)} in this run"


def _disk(status: ServerStatus) -> list[Line]:
    journal = status.journal
    if journal is None:
        return []
    waiting = f"{journal.pending} records wait"
    if journal.error:
        cure = "; make room on the disk of the run folder" if "full" in journal.error else ""
        return [Line(f"! {waiting}: {printable(journal.error)}{cure}", BAD, "disk")]
    if journal.oldest_pending_seconds > 1:
        return [Line(f"! {waiting}, the oldest for {seconds(journal.oldest_pending_seconds)}", WARNING, "disk")]
    text = (
        f"{waiting}; the last commit took {1000 * journal.last_commit_seconds:.1f} ms; {number(journal.records)} "
        f"records in {number(journal.commits)} commits, {decimal(journal.bytes)}"
    )
    return [Line(text, label="disk", minor=True)]


def _replicas(status: ServerStatus) -> list[Line]:
    replicas = status.replicas
    if not replicas:
        return []
    ill = [replica for replica in replicas if not replica.healthy]
    text = (
        f"{len(replicas) - len(ill)} of {len(replicas)} replicas answer, {sum(r.in_flight for r in replicas)} in "
        f"flight, {number(sum(r.calls for r in replicas))} calls, {number(sum(r.failures for r in replicas))} failed"
    )
    if not ill:
        return [Line(text, label="vLLM", minor=True)]
    addresses = ", ".join(short(replica.address, 40) for replica in ill[:4])
    return [Line(f"! {text}; set aside: {addresses}", BAD, "vLLM")]


def _model(status: ServerStatus) -> str:
    job = status.job
    parts = [short(status.model, 60) or UNKNOWN]
    if job is not None:
        parts.append(f"{job.batch_size} tasks of {job.num_repeat} answers, collected by {job.collection}")
    parts.append(f"{status.weight_syncs} weight syncs")
    if status.engine_pid is not None:
        parts.append(f"process {status.engine_pid}")
    return ", ".join(parts)


def _tasks(status: ServerStatus) -> Table:
    """The pool by task: those that lack least first, then those that only run, complete ones last."""
    pool, titles = status.pool, ("task", "finished", ">running", "state")
    if pool is None:
        return Table(titles, [], "no job, no pool")
    running = Counter(
        episode.task_id for episode in status.running if episode.task_id and episode.episode_type == "train"
    )
    finished = {**dict.fromkeys(running, 0), **pool.tasks}
    rows: list[Row] = []
    for task, done in sorted(finished.items(), key=lambda item: (item[1] >= pool.num_repeat, -item[1])):
        lacking = pool.num_repeat - done
        bar_of_task = f"{bar(done, pool.num_repeat, _TASK_BAR)} {done}/{pool.num_repeat}"
        state = "complete" if lacking <= 0 else f"{lacking} to come" if done else "begun"
        rows.append(Row((task, bar_of_task, str(running[task] or ""), state), "" if lacking > 0 else DIM))
    complete = sum(count >= pool.num_repeat for count in finished.values())
    note = f"{complete} complete, {len(rows) - complete} begun; a batch takes {pool.batch_size}"
    return Table(titles, rows, note if rows else "no task has begun")
