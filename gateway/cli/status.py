"""The status of a swarm server as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.tui.format import printable, step_line
from swarm.protocol import ServerStatus

#: rows of each kind that are shown
ROWS = 5


def status_lines(status: ServerStatus, steps: int = 5) -> list[str]:
    """The engine, its pool, who runs what, what went wrong, the last ``steps`` steps and a dead engine's last lines.

    What there is nothing to tell of is left out.
    """
    engine = status.engine
    lines = [f"engine  {engine.engine_status} for {status.engine_seconds:.0f} s, step {engine.global_step}"]
    detail = " ".join(part for part in (status.boot_stage, engine.engine_status_detail) if part)
    if detail:
        lines.append(f"detail  {detail}")
    if failure := status.engine_failure:
        lines.append(f"died    {failure.reason} ({failure.count} in a row without a step)")
    if status.model:
        lines.append(f"model   {status.model}")
    if status.pool:
        pool = status.pool
        lines.append(
            f"batch   {pool.completed_tasks}/{pool.batch_size} tasks, {pool.running_episodes} episodes running, "
            f"{pool.quarantined_episodes} quarantined, {pool.dropped_episodes} dropped"
        )
    lines += _pace(status) + _people(status) + _running(status) + _troubles(status)
    lines += [f"log     {entry.tag + ': ' if entry.tag else ''}{entry.message}" for entry in status.log[-ROWS:]]
    lines += [step_line(step) for step in status.steps[-steps:]]
    lines += [f"  | {line}" for line in status.last_lines]
    return [printable(line) for line in lines]


def _pace(status: ServerStatus) -> list[str]:
    lines: list[str] = []
    if status.rates and (status.rates.episodes_per_minute or status.rates.sampled_tokens_per_second):
        lines.append(
            f"pace    {status.rates.episodes_per_minute:.0f} episodes/min, "
            f"{status.rates.sampled_tokens_per_second:.0f} tokens/s"
        )
    if status.waiting_claims:
        lines.append(f"waits   {status.waiting_claims} claims, the longest for {status.longest_wait_seconds:.0f} s")
    return lines


def _people(status: ServerStatus) -> list[str]:
    busiest = sorted(status.clients, key=lambda row: (not row.active, -row.running, row.idle_seconds))
    lines = [
        f"client  {row.client_uuid[:24]}: {row.running} running, {row.ended} ended, {row.trained} trained"
        + ("" if row.active else f", silent for {row.idle_seconds:.0f} s")
        + (", throttled" if row.throttled else "")
        + (", agreed" if row.agreed else "")
        for row in busiest[:ROWS]
    ]
    return lines + _more(len(busiest), "clients")


def _running(status: ServerStatus) -> list[str]:
    """Episodes that will be taken back if nothing happens: the others are in the batch's line."""
    idle = [row for row in status.running if row.idle_seconds > row.idle_timeout / 2]
    lines = [
        f"idle    episode {row.episode_uuid[-8:]} of {row.client_uuid[:24]} for {row.idle_seconds:.0f} of "
        f"{row.idle_timeout:.0f} s"
        for row in idle[:ROWS]
    ]
    return lines + _more(len(idle), "idle episodes")


def _troubles(status: ServerStatus) -> list[str]:
    lines = [
        f"replica {row.address} is set aside, {row.failures} failed calls" for row in status.replicas if not row.healthy
    ]
    lines += _reasons("bad", status.quarantined) + _reasons("drop", status.dropped)
    journal = status.journal
    if journal and journal.error:
        lines.append(f"DISK    {journal.pending} records wait for the disk: {journal.error}")
    elif journal and journal.oldest_pending_seconds > 1:
        lines.append(f"disk    {journal.pending} records wait, the oldest for {journal.oldest_pending_seconds:.1f} s")
    return lines


def _reasons(word: str, counts: Mapping[str, int]) -> list[str]:
    return [f"{word:<7} {count} episodes: {reason}" for reason, count in list(counts.items())[:ROWS]]


def _more(count: int, what: str) -> list[str]:
    return [f"        and {count - ROWS} more {what}"] if count > ROWS else []
