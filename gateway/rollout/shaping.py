"""What is to be sampled for one request: the bodies of its group, and whether one call may sample them all.

Invariant: where the submit hook fails, the request is sampled as it came and never trained.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.dialects import ChatDialect
from gateway.observability.request import phase
from gateway.rollout.claims import Serving
from gateway.rollout.ports import Route
from gateway.stats import DropReason
from gateway.types import Incoming
from reward_hooks import HookContext, Submission, UserRequest
from swarm.errors import HookError, RequestError
from swarm.types import Task

logger = logging.getLogger(__name__)

#: Temperatures below it are none to vLLM.
_GREEDY = 1e-5


@dataclass(frozen=True, slots=True)
class Shaped:
    """The group of one request before it is claimed.

    Attributes:
        group_id: names the group in logs and in the answer's id.
        submission: the request bodies and their task.
        bodies: the same as JSON for an episode's address; each samples one answer.
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
    drop: DropReason | None
    failure: HookError | None = None

    @property
    def answer_id(self) -> str:
        """The ``id`` of the ``chat.completion`` that comes of it."""
        return f"chatcmpl-{self.group_id}"


async def shape(route: Route, incoming: Incoming, serving: Serving) -> Shaped:
    """What to sample for ``incoming`` on ``route``.

    Raises:
        RequestError: more choices are asked for than the group has answers, or a body is no JSON.
    """
    assert route.hooks is not None
    call = incoming.call
    size = route.settings.num_repeat or serving.num_repeat or 1
    if call.choices > size:
        raise RequestError(f"n is {call.choices}, but this gateway samples {size} answers", param="n")
    group_id = secrets.token_hex(16)
    context = HookContext(
        num_repeat=size,
        policy_version=serving.policy_version,
        group_id=group_id,
        deadline_seconds=route.settings.hook_timeout_seconds,
    )
    # the group's own id names the task: a caller may send one x-request-id twice, two prompts are two groups
    asked = UserRequest(request_id=group_id, body=call.body, model=call.model or "", headers=dict(incoming.headers))
    drop: DropReason | None = None if size == serving.num_repeat else DropReason.SIZE
    failure: HookError | None = None
    try:
        with phase("hook"):
            submission = await route.hooks.submit(asked, context)
    except HookError as exc:
        logger.error("group %s is not trained: %s", group_id, exc)
        route.stats.hook_failures[exc.code or exc.type] += 1
        submission = Submission(task=Task(task_id=group_id), requests=[call.body] * call.choices)
        drop, failure = DropReason.SUBMIT_HOOK, exc
    # whatever name the application or the hook gave, an alias or nothing: there is one model to sample from
    bodies = _bodies(submission.requests, serving.model)
    return Shaped(
        group_id=group_id,
        submission=submission,
        bodies=bodies,
        context=context,
        shares_call=_shares_call(submission.requests, bodies, serving),
        takes_partial=serving.takes_partial,
        drop=drop,
        failure=failure,
    )


def _bodies(requests: Sequence[dict[str, Any]], model: str) -> list[bytes]:
    """Each request as JSON; of equal requests one after the other only the first is encoded."""
    dialect = ChatDialect()
    bodies: list[bytes] = []
    for place, request in enumerate(requests):
        same = place > 0 and request == requests[place - 1]
        bodies.append(bodies[-1] if same else dialect.sampling_body(request, model))
    return bodies


def _shares_call(requests: Sequence[Mapping[str, Any]], bodies: Sequence[bytes], serving: Serving) -> bool:
    """Whether the hooks left the bodies alike, and they are sampled in fact (a greedy call has but one answer, so vLLM
    refuses to give several)."""
    if len(bodies) < 2 or bodies.count(bodies[0]) < len(bodies):
        return False
    temperature = requests[0].get("temperature")
    greedy = (isinstance(temperature, int | float) and temperature < _GREEDY) or requests[0].get("use_beam_search")
    return not (serving.keeps_sampling and greedy)
