"""What a training step did and how full the next batch is, in the words that every command and the monitor use.

Invariant: a value that nobody measured is left out, never shown as zero.
"""

from __future__ import annotations

from swarm.measures import CALLS, RESPONSE_TOKENS, REWARD, SPREAD, SUCCESS, TASKS, TASKS_WITH_SIGNAL
from swarm.states import EngineState
from swarm.status import PoolInformation
from swarm.types import StepResult

#: What a state means for those who wait for the next step.
DOING = {
    EngineState.OFFLINE: "the engine is off",
    EngineState.BOOTING: "the engine boots",
    EngineState.ROLLING: "collecting answers",
    EngineState.ROLLING_POST: "the batch is full; the last running episodes may finish",
    EngineState.WEIGHT_SYNCING: "a step is computed, or its weights go to vLLM",
}


def share(value: float) -> str:
    """``40%``; ``<1%`` and ``>99%`` of what rounding would make none or all."""
    text = f"{value:.0%}"
    return "<1%" if text == "0%" and value > 0 else ">99%" if text == "100%" and value < 1 else text


def reward(value: float) -> str:
    """A reward, or a difference of two, as every line has it: ``0.006``; a smaller one with its digits, unless it is
    what sums of fractions leave of zero."""
    return f"{value:.3g}" if 1e-9 < abs(value) < 5e-4 or abs(value) >= 1e5 else f"{value:z.3f}"


def step_line(step: StepResult) -> str:
    """``step 12  reward 0.412 ±0.250  4 of 4 groups differ  success 40%  9.8 s  43 tokens/answer  2.0 calls``; the
    calls only where an episode made several."""
    metrics, parts = step.metrics, [f"step {step.step:>4}"]
    if REWARD in metrics:
        spread = f" ±{reward(metrics[SPREAD])}" if SPREAD in metrics else ""
        parts.append(f"reward {reward(metrics[REWARD])}{spread}")
    if signal := groups_that_differ(metrics.get(TASKS_WITH_SIGNAL), metrics.get(TASKS)):
        parts.append(signal)
    if SUCCESS in metrics:
        parts.append(f"success {share(metrics[SUCCESS])}")
    parts.append(f"{step.seconds:.1f} s")
    if RESPONSE_TOKENS in metrics:
        parts.append(f"{metrics[RESPONSE_TOKENS]:.0f} tokens/answer")
    if metrics.get(CALLS, 1.0) != 1.0:
        parts.append(f"{metrics[CALLS]:.1f} calls")
    return "  ".join(parts)


def groups_that_differ(with_signal: float | None, groups: float | None) -> str:
    """``3 of 4 groups differ``, empty where that is unknown: GRPO learns only from groups whose rewards differ."""
    if with_signal is None or groups is None:
        return ""
    return f"{with_signal:.0f} of {groups:.0f} groups differ" + ("" if with_signal else ": nothing to learn")


def batch_progress(pool: PoolInformation) -> tuple[int, int, str]:
    """How full the next batch is: done, of how many (0: there is no such number), and in words, such as ``1 of 4
    tasks, 3 requests to go``. A request is one task, which gives the batch its ``num_repeat`` episodes."""
    if pool.by_agreement:
        return 0, 0, f"{len(pool.tasks)} tasks wait for the clients' agreement"
    if pool.whole_groups:
        done, of, unit = pool.completed_tasks, pool.batch_size, "tasks"
        requests = max(0, of - done)
    else:
        done, of, unit = pool.completed_episodes, pool.batch_size * pool.num_repeat, "episodes"
        requests = -(-max(0, of - done) // max(1, pool.num_repeat))
    plural = "" if requests == 1 else "s"
    return done, of, f"{done} of {of} {unit}, {requests} request{plural} to go"
