"""What a run of the kill test did, in a few numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from swarm.states import EpisodeState
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
        "journal": dict(Counter(e["state"] for e in seen.episodes.values())),
        "dropped": dict(
            Counter(
                e["lost_reason"] or e["drop_reason"]
                for e in seen.episodes.values()
                if e["state"] == EpisodeState.DROPPED
            )
        ),
        "attempts": sum("trained" in line for line in seen.engine),
        "steps": len(seen.steps),
    }
