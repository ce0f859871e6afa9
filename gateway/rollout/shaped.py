"""``Shaped``: what is to be sampled for one request, as its submit hook wants it, before anything is claimed.

Invariant: what a group without episodes samples is the beginning of what the claimed one would have sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reward_hooks import HookContext, Submission
from swarm.errors import HookError


@dataclass(frozen=True, slots=True)
class Shaped:
    """The group of one request before it is claimed.

    Attributes:
        group_id: names the group in logs and in the answer's id.
        submission: the request bodies and their task.
        bodies: the same as JSON; each samples one answer.
        context: for the hooks.
        shares_call: whether one call may sample all answers.
        takes_partial: whether the job trains groups that lack answers.
        drop: why the group will not be trained, if that is known already.
        failure: of the submit hook.
    """

    group_id: str
    submission: Submission
    bodies: list[bytes]
    context: HookContext
    shares_call: bool
    takes_partial: bool
    drop: str | None
    failure: HookError | None = None

    def untrained(self, reason: str, size: int) -> Shaped:
        """The same for a group without episodes, of its first ``size`` answers if it has more.

        Args:
            reason: why nothing is claimed.
        """
        return replace(
            self,
            submission=self.submission.model_copy(update={"requests": self.submission.requests[:size]}),
            bodies=self.bodies[:size],
            context=self.context.model_copy(update={"num_repeat": min(size, self.context.num_repeat)}),
            drop=self.drop if self.failure is not None else reason,
        )

    @property
    def answer_id(self) -> str:
        """The ``id`` of the resulting ``chat.completion``."""
        return f"chatcmpl-{self.group_id}"
