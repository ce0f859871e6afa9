"""What a run of the kill test did, in a few numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from swarm.server.journal.schema import State
from tests.kill.harness import Outcome


def summary(outcome: Outcome) -> dict[str, Any]:
    seen = outcome.witnesses
    answers = [line for said in seen.clients.values() for line in said]
    return {
        "seed": outcome.seed,
        "seconds": round(outcome.seconds, 1),
        "kills": dict(outcome.kills),
        "faults": dict(outcome.faults),
        "acknowledged_rewards": len(seen.acknowledged),
        "late": dict(Counter(line["code"] for line in answers if "late" in line)),
        "aborted": sum("aborted" in line for line in answers),
        "journal": {State(state).name: n for state, n in Counter(e["state"] for e in seen.episodes.values()).items()},
        "dropped": dict(
            Counter(e["lost_reason"] or e["drop_reason"] for e in seen.episodes.values() if e["state"] == State.DROPPED)
        ),
        "attempts": sum("trained" in line for line in seen.engine),
        "steps": len(seen.steps),
    }
