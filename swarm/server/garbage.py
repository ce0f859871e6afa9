"""Python's search for cyclic garbage, in steps of some milliseconds, and now and then as a whole.

Invariant: an object is looked at once while it is young, with some :data:`YOUNG` others, and then left alone until
everything is looked at, some :data:`STEPS` such steps later, or when that takes less than :data:`SHARE` of the time.
So objects that are garbage without being found are a bounded number where that look is short, and none of them is
without a cycle: those go with their last reference.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

#: new objects after which they are looked at. A look follows every reference, so the tokens of each waiting episode
#: cost as much as many objects: with 50,000 it stopped the server for 50 to 100 ms
YOUNG = 2_000
STEPS = 250
#: of the time, at most, for looks at everything; with many long episodes in the pool one takes a second
SHARE = 0.01
#: seconds between two looks whether it is time to look at everything
PAUSE = 1.0


async def collect_in_steps() -> None:
    """Have it so in this process until cancelled; what is there already counts as looked at."""
    steps, rests_until = 0, 0.0

    def on_step(phase: str, info: dict[str, Any]) -> None:
        nonlocal steps
        if phase == "stop":
            steps += 1
            gc.freeze()

    before = gc.get_threshold()
    gc.freeze()
    gc.callbacks.append(on_step)
    gc.set_threshold(YOUNG)
    try:
        while True:
            await asyncio.sleep(PAUSE)
            began = time.monotonic()
            if steps >= STEPS and began >= rests_until:
                gc.unfreeze()
                gc.collect()
                steps = 0
                ended = time.monotonic()
                rests_until = ended + (ended - began) / SHARE
    finally:
        gc.callbacks.remove(on_step)
        gc.set_threshold(*before)
        gc.unfreeze()
