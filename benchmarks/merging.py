"""Part of :mod:`benchmarks.training`: what merging calls into timelines saves an update, on recorded traces.

Each trace is the mini-batch of one attempt of :mod:`benchmarks.traces`, once with a row per call and once with a row
per timeline, as :func:`swarm.server.episodes.timelines.merge_calls` makes them; each by verl's padded rows and by
tries.

* ``trace_tools``: one conversation with tools; ``trace_sub_agent``: with a conversation of a sub-agent in between;
  ``trace_compacted``: the history becomes a summary half-way;
* ``trace_thinking``: the first one where the chat template drops earlier reasoning, so that nothing merges.
"""

from __future__ import annotations

import re
import statistics
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.traces import attempts
from swarm.server.episodes.timelines import count_tokens, merge_calls
from swarm.tokens import Timeline

#: shape -> the attempt, and whether its model thinks
TRACES = {
    "trace_tools": (0, False),
    "trace_sub_agent": (1, False),
    "trace_compacted": (3, False),
    "trace_thinking": (0, True),
}
_PIECES = re.compile(r"<\|im_\w+\|>|\w+|\s|[^\w\s]")


def encoder(model: Path | None, vocabulary: int) -> Callable[[str], list[int]]:
    """Token ids of a text: the model's own, or a number for each word, sign and space."""
    if model is None:
        return lambda text: [10 + zlib.crc32(piece.encode()) % (vocabulary - 10) for piece in _PIECES.findall(text)]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def measure(
    worker: Any,
    name: str,
    repetitions: int,
    encode: Callable[[str], list[int]],
    most_calls: int | None,
    make_batch: Any,
    make_arm: Any,
) -> dict[str, Any]:
    """All figures of one trace.

    Args:
        most_calls: of the trace, from its beginning.
        make_batch: :func:`benchmarks.training.make_batch`.
        make_arm: :class:`benchmarks.training.Arm`.
    """
    attempt, thinks = TRACES[name]
    calls = attempts(encode, thinks=thinks)[attempt][:most_calls]
    alone = [line for call in calls for line in merge_calls([call])]
    merged = merge_calls(calls)
    counts = count_tokens(calls, merged)

    def batch(lines: Sequence[Timeline]) -> Any:
        rows = [(line.prompt_ids.tolist(), line.response_ids.tolist()) for line in lines]
        # every token of an episode has the same advantage
        return make_batch(rows, [line.response_mask.tolist() for line in lines], advantages=[0.7] * len(rows))

    arms = {
        (what, how): make_arm(worker, batch(lines), how == "tries")
        for what, lines in (("calls", alone), ("timelines", merged))
        for how in ("rows", "tries")
    }
    sampled = {key: _sampled(arm.log_probs(), lines_of) for key, arm, lines_of in _with_lines(arms, alone, merged)}
    reference = sampled["calls", "rows"]
    wanted, found = arms["calls", "rows"].gradient(), arms["timelines", "rows"].gradient()
    norms = float(wanted.norm()), float(found.norm())
    for _ in range(repetitions):
        for arm in arms.values():
            arm.measure()

    def ratio(how: str) -> dict[str, Any]:
        pairs = zip(arms["calls", how].cpu, arms["timelines", how].cpu, strict=True)
        values = [one / other for one, other in pairs]
        quartiles = statistics.quantiles(values, n=4)
        return {
            "median": round(statistics.median(values), 2),
            "quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
        }

    by_rows = ratio("rows")
    return {
        "calls": counts.calls,
        "timelines": counts.timelines,
        "sampled_tokens": counts.sampled,
        "unmerged_tokens": counts.unmerged,
        "merged_tokens": counts.prompts + counts.masked + counts.trained,
        "cpu_ratio": by_rows["median"],
        "cpu_ratio_quartiles": by_rows["quartiles"],
        "cpu_ratio_with_tries": ratio("tries")["median"],
        "cpu_ratio_with_tries_quartiles": ratio("tries")["quartiles"],
        "cpu_s": {" ".join(key): round(statistics.median(arm.cpu), 3) for key, arm in arms.items()},
        "goal": None,
        "log_probs_difference": max(float(np.abs(one - reference).max()) for one in sampled.values()),
        "gradient_difference": float((wanted - found).norm()) / norms[0],
        "gradient_cosine": float(wanted @ found) / (norms[0] * norms[1]),
    }


def _with_lines(
    arms: dict[tuple[str, str], Any], alone: Sequence[Timeline], merged: Sequence[Timeline]
) -> list[tuple[tuple[str, str], Any, Sequence[Timeline]]]:
    return [(key, arm, alone if key[0] == "calls" else merged) for key, arm in arms.items()]


def _sampled(log_probs: Any, lines: Sequence[Timeline]) -> np.ndarray[Any, Any]:
    """The log-probabilities of the sampled tokens, in an order that does not depend on the rows."""
    values = log_probs.float().numpy()
    found: dict[tuple[bytes, int], float] = {}
    start = 0
    for line in lines:
        whole = np.concatenate([line.prompt_ids, line.response_ids])
        for at in np.flatnonzero(line.response_mask):
            end = len(line.prompt_ids) + int(at) + 1
            found[whole[:end].tobytes(), end] = float(values[start + int(at)])
        start += len(line.response_ids)
    return np.array([found[key] for key in sorted(found)])
