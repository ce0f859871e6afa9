"""What the outcome of a session is worth to each of its delivered answers: the upper of two levels of advantage.

Invariant: an answer that was not delivered has no part in the outcome; it is credited with its own reward alone, and
neither gains nor loses by what is added to the advantage of the delivered one.

The lower level is the group: the N answers to one request were sampled in one state of the conversation, and each has
the advantage of its reward in this group (:mod:`adapters.verl.advantage`). The upper level is the session. With its
outcome ``R`` and ``K`` credited turns, the delivered answer of turn ``k`` (0 for the first) gets beyond that

``weight * discount ** (K - 1 - k) * A``

where ``A`` compares ``R`` with the outcomes of the last sessions of the same task, this one included (``G``):

======== =====================================================================
baseline ``A``
======== =====================================================================
std      ``(R - mean(G)) / (std(G) + 1e-6)``, the deviation with ``n - 1``
mean     ``R - mean(G)``
none     ``R``
======== =====================================================================

The first session of a task is compared with nothing: its ``A`` is ``R``. Sessions do not wait for each other, so each
is compared with those that ended before it. Turns that the user went back beyond are not credited; turns of sub-agents
are, in the order in which all were answered.

These are the episode and step advantages of GiGPO (Feng et al. 2025, arXiv:2505.10978: ``A = A_E + w A_S``, and both
ways to normalise), with two differences. Its step groups are states that happen to recur among trajectories;
ours are sampled on purpose, N answers in each state, and only one of them has a future. And its discount belongs to the
returns of step groups; ours spreads the outcome over the turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from statistics import mean, stdev

from gateway.config.route import Baseline
from gateway.sessions.conversation import Conversation, DeliveredTurn
from reward_hooks import HookContext, Reward
from swarm.concurrency import Latest

#: Sessions of one task that an outcome is compared with, this one included.
_SESSIONS = 32
#: Tasks whose outcomes are remembered; the longest unused leave.
_TASKS = 10_000
#: Session hooks that run at once.
_AT_ONCE = 8

Task = tuple[str, str, str]


def shares(credited: Sequence[bool], discount: float) -> list[float]:
    """The share of each turn, oldest first, in the session's advantage: ``discount ** (number of credited turns after
    it)``, or 0 for a turn that is not ``credited``."""
    backwards: list[float] = []
    share = 1.0
    for counts in reversed(credited):
        backwards.append(share if counts else 0.0)
        share *= discount if counts else 1.0
    return backwards[::-1]


class Crediting:
    """Asks hooks what sessions were worth, and credits their turns."""

    def __init__(self) -> None:
        self._outcomes = Latest[Task, deque[float]](_TASKS)
        self._permits = asyncio.Semaphore(_AT_ONCE)

    def advantage(self, task: Task, outcome: float, baseline: Baseline) -> float:
        """How much better ``outcome`` is than those of the same task; it is remembered."""
        outcomes = self._outcomes[task] = self._outcomes.get(task) or deque(maxlen=_SESSIONS)
        outcomes.append(outcome)
        if baseline == "none" or len(outcomes) == 1:
            return outcome
        # exact: the difference to the mean of equal ones is 0
        above = outcome - mean(outcomes)
        return above / (stdev(outcomes) + 1e-6) if baseline == "std" else above

    async def credits(self, conversation: Conversation, turns: Sequence[DeliveredTurn]) -> list[float]:
        """What each of ``turns``, oldest first, is credited with.

        Raises:
            HookError: the hook gives no result.
        """
        settings = conversation.settings
        context = HookContext(
            num_repeat=settings.num_repeat or 1,
            group_id=conversation.session_id,
            deadline_seconds=settings.hook_timeout_seconds,
        )
        async with self._permits:
            result = await conversation.hooks.end_session(conversation.session(list(turns)), context)
        weight = settings.session_weight
        if result is None:
            return [0.0] * len(turns)
        if not isinstance(result, Reward):
            return [weight * reward.value for reward in result]
        scope = conversation.scope
        # of one task are sessions that were said to be, or that begin with the same request
        task = scope.route, scope.key_id, conversation.task or conversation.turns[0].asked.hex()
        advantage = self.advantage(task, result.value, settings.session_baseline)
        parts = shares([not turn.left for turn in turns], settings.session_discount)
        return [weight * part * advantage for part in parts]
