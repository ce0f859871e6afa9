"""What a client prints of the server's numbers; plain lines, so that they look the same in a log."""

from __future__ import annotations

from swarm.protocol import PoolInformation

#: Tasks named in one report; a batch may have thousands.
MAX_TASKS = 20


def rollout_lines(pool: PoolInformation) -> list[str]:
    """What the current batch has and still needs."""
    wanted = pool.batch_size * pool.num_repeat
    running = f"{pool.running_episodes} of {pool.slots} slots run"
    lines = [
        "current batch",
        f"  tasks     {pool.completed_tasks} of {pool.batch_size} complete, with {pool.num_repeat} episodes each",
        f"  episodes  {pool.completed_episodes} of {wanted} finished, {running}",
        f"  lost      {pool.quarantined_episodes} quarantined, {pool.dropped_episodes} dropped",
    ]
    shown = list(pool.tasks.items())[:MAX_TASKS]
    if shown:
        more = f" and {len(pool.tasks) - MAX_TASKS} more" if len(pool.tasks) > MAX_TASKS else ""
        lines.append("  by task   " + ", ".join(f"{task}: {count}" for task, count in shown) + more)
    return lines
