"""The status of a swarm server as lines of text."""

from __future__ import annotations

from swarm.protocol import ServerStatus
from swarm.types import StepResult

REWARD = "swarm/reward_mean"
RESPONSE_TOKENS = "swarm/response_tokens_mean"


def step_line(step: StepResult) -> str:
    """``step 12  reward 0.412  9.8 s  43 tokens``; what the engine did not report is left out."""
    parts = [f"step {step.step:>4}"]
    if REWARD in step.metrics:
        parts.append(f"reward {step.metrics[REWARD]:.3f}")
    parts.append(f"{step.seconds:.1f} s")
    if RESPONSE_TOKENS in step.metrics:
        parts.append(f"{step.metrics[RESPONSE_TOKENS]:.0f} tokens/answer")
    return "  ".join(parts)


def status_lines(status: ServerStatus, steps: int = 5) -> list[str]:
    """The engine, its pool, its last ``steps`` steps, and the last lines of a dead engine."""
    engine = status.engine
    lines = [f"engine  {engine.engine_status} for {status.engine_seconds:.0f} s, step {engine.global_step}"]
    detail = " ".join(part for part in (status.boot_stage, engine.engine_status_detail) if part)
    if detail:
        lines.append(f"detail  {detail}")
    if status.model:
        lines.append(f"model   {status.model}")
    if status.pool:
        pool = status.pool
        lines.append(
            f"batch   {pool.completed_tasks}/{pool.batch_size} tasks, {pool.running_episodes} episodes running, "
            f"{pool.quarantined_episodes} quarantined, {pool.dropped_episodes} dropped"
        )
    lines += [step_line(step) for step in status.steps[-steps:]]
    lines += [f"  | {line}" for line in status.last_lines]
    return lines
