"""What the data plane answers in AgentJet's words, for jobs in its form (``dialect: agentjet``).

Invariant: only calls that an AgentJet client's agent makes of its own episode are answered so; a group, whose answer
may go to a user of the gateway, never is. Nothing of such an answer was sampled, and nothing of it is recorded.

An agent written for AgentJet is told by an answer, not by an error, that its conversation has become too long: it looks
for :data:`SIGNATURE` in it, and ends the episode with the reward that it has earned by then.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from adapters.dialects import ChatDialect
from swarm.errors import ContextLengthError
from swarm.job import TrainJob
from swarm.server.dataplane.answers import Body
from swarm.server.dataplane.calls import CallOwner

#: what its agents look for
SIGNATURE = "AgentJet: Exceeded max model context length. token_overflow"


def answers_overflow(job: TrainJob, owner: CallOwner) -> bool:
    """Whether a call that is too long gets an answer."""
    return job.dialect == "agentjet" and len(owner.episodes) == 1 and not owner.episodes[0].claim.group_uuid


def overflow_answer(error: ContextLengthError, job: TrainJob) -> Body:
    """The chat completion in place of ``error``."""
    prompt = int(error.body()["error"]["prompt_tokens"])
    words = (
        f"{SIGNATURE}(prompt_token_length.{prompt}>=max_model_len.{job.max_model_len}"
        f"-max_response_length_in_one_turn.{job.max_turn_length or 0})"
    )
    return {
        "id": f"{ChatDialect.id_prefix}{secrets.token_hex(16)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": job.model_name,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": words},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
    }


def overflow_chunks(answer: Body, *, usage: bool) -> list[Body]:
    """:func:`overflow_answer` as the chunks of a stream; ``usage``: with one for the usage."""
    head: Body = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(delta: Body, finish: str | None) -> Body:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    (choice,) = answer["choices"]
    chunks = [chunk(choice["message"], None), chunk({}, choice["finish_reason"])]
    return [*chunks, {**head, "choices": [], "usage": answer["usage"]}] if usage else chunks
