"""Hands a group's rewards to the swarm server, with what it notes beside them.

Invariant: a group counts as trained only after the server acknowledged it; a group that is given up is aborted and
counted. Notes are of bounded size, whatever a hook returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.observability.request import phase
from gateway.stats import Accounted, DropReason, Stats
from reward_hooks.contract import EQUAL_WITHIN, GroupScore, Reward, sendable, texts_of
from swarm.client import AsyncSwarmClient, RetryPolicy
from swarm.errors import SwarmGatewayError, UnavailableError
from swarm.evidence.pairs import Pair
from swarm.measures import MAX_LOGGED, MAX_NAME, REFUSED, SHUFFLED
from swarm.protocol import MAX_REASON, EpisodeTokens
from swarm.types import Notes, Task, WorkflowOutput

logger = logging.getLogger(__name__)

_RETRIES = RetryPolicy(base=0.2, cap=5.0)
#: Longest JSON of a task that is kept, in characters.
MAX_TASK = 8000
#: The component that holds the session's credit.
SESSION = "session"
_FILTERED = "content_filter"
#: what is counted of an episode's tokens
_NUMBERS = tuple(name for name in EpisodeTokens.model_fields if name != "why")


async def submit(
    client: AsyncSwarmClient,
    task_id: str,
    outputs: Mapping[str, WorkflowOutput],
    seconds: float,
    stats: Stats,
    account: Accounted,
    pair: Pair | None = None,
) -> DropReason | None:
    """End all episodes of a group; repeated while the server is away, which is safe because ends are idempotent.

    Args:
        outputs: by episode uuid.
        stats: counts the outcome.
        account: counts what the server says of the tokens.
        pair: of a challenger's group and an incumbent's answer, recorded with the end.

    Returns:
        ``None`` when acknowledged within ``seconds``, else why not; then the episodes are aborted.
    """

    async def offer() -> DropReason | None:
        failures = 0
        while True:
            try:
                ended = await client.calls.end_group(task_id, outputs, pair=pair)
                break
            except UnavailableError as exc:
                logger.warning("group %s: %s; offering it again", task_id, exc)
            except SwarmGatewayError as exc:
                logger.warning("group %s is not trained: %s", task_id, exc)
                return DropReason.REFUSED
            failures += 1
            await asyncio.sleep(_RETRIES.delay(failures))
        for counts in ended.tokens.values():
            account.tokens.update({name: getattr(counts, name) for name in _NUMBERS})
            if counts.dropped:
                account.why[counts.why] += counts.dropped
        if ended.error:
            logger.warning("group %s is accepted but not trained: %s", task_id, ended.error)
        return DropReason.QUARANTINED if ended.error else None

    with phase("submit") as submitting:
        try:
            async with asyncio.timeout(seconds):
                reason = await offer()
        except TimeoutError:
            logger.error("group %s is not trained: not acknowledged within %g s", task_id, seconds)
            reason = DropReason.SUBMIT_TIMEOUT
        except Exception as exc:  # nobody else gives these episodes back
            logger.error("group %s is not trained: %s", task_id, type(exc).__name__, exc_info=exc)
            reason = DropReason.REFUSED
        if submitting is not None:
            submitting.set_attribute("gateway.drop_reason", reason or "")
    add_up(stats.accounted, account)
    if reason is None:
        stats.groups.trained += 1
    else:
        stats.groups.dropped[reason] += 1
        await client.abort(outputs, reason.value)
    return reason


def add_up(total: Accounted, account: Accounted) -> None:
    """Count ``account`` in ``total`` too."""
    total.tokens.update(account.tokens)
    total.why.update(account.why)


def refuses(message: Mapping[str, Any], finish: str, openings: Sequence[re.Pattern[str]]) -> bool:
    """Whether an answer declines to answer: its ``refusal`` or finish says so, or it calls no tool and its text begins
    with one of ``openings``."""
    if message.get("refusal") or finish == _FILTERED:
        return True
    text = "" if message.get("tool_calls") else "".join(texts_of(message)[:1]).lstrip()
    return any(opening.match(text) for opening in openings)


def workflow_outputs(
    score: GroupScore,
    credit: Mapping[int, float],
    notes: Notes,
    task: Task,
    delivered: Sequence[bool],
    refused: Sequence[bool],
    *,
    shuffled: bool = False,
) -> list[WorkflowOutput]:
    """The results of a group's episodes, in the order of ``score``.

    Args:
        credit: added to the advantage of answers, by their index in ``score``.
        task: kept with the first output, so that a hook can be tried on the group later.
        delivered: whether the user got it, for each.
        refused: whether it declines to answer, for each; logged, for the watch over the training.
        shuffled: permute the rewards and credits, for a control run, and log that; rank, components and reasons stay in
            place.
    """
    ranks = [1 + sum([other > value + EQUAL_WITHIN for other in score.values]) for value in score.values]
    own = [(value, credit.get(index, 0.0)) for index, value in enumerate(score.values)]
    paired = random.sample(own, len(own)) if shuffled else own
    marks = {SHUFFLED: 1.0} if shuffled else {}
    return [
        WorkflowOutput(
            reward=value,
            credit=credited,
            log_metrics={**marks, **_components(reward, credit.get(index)), REFUSED: float(refused[index])},
            notes=notes.model_copy(
                update={
                    "rank": ranks[index],
                    "reason": sendable(reward.reason)[:MAX_REASON] if reward.reason else "",
                    "delivered": delivered[index],
                    "task": _task(task) if index == 0 else None,
                }
            ),
        )
        for index, ((value, credited), reward) in enumerate(zip(paired, score.rewards, strict=True))
    ]


def _components(reward: Reward, credit: float | None) -> dict[str, float]:
    listed = list(reward.components.items())[:MAX_LOGGED]
    kept = {sendable(name)[:MAX_NAME]: value for name, value in listed}
    return kept if credit is None else {**kept, SESSION: credit}


def _task(task: Task) -> dict[str, Any] | None:
    """The task without its messages, which are in the prompt's tokens; None if it is too long or not JSON."""
    kept = task.model_dump(include={"main_query", "metadata"})
    try:
        size = len(json.dumps(kept, allow_nan=False))
        # the client's serializer refuses more: lone surrogates and deep nesting
        Notes(task=kept).model_dump_json()
    except (TypeError, ValueError, RecursionError):  # a submit hook's metadata can hold anything
        return None
    return kept if size <= MAX_TASK else None
