"""The sampling fields of a request: the values that vLLM refuses, and what a trained answer is sampled with instead.

Invariant: the swarm server, which samples, and the gateway, which says so in its answers, read one table. A train
episode samples from the policy itself (the trainer's temperature, no truncation, penalties, biases or banned tokens)
unless its job says ``sampling: app``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from swarm.errors import RequestError
from swarm.job import TrainJob
from swarm.protocol import EpisodeType

#: Neutral values, sent explicitly: a model's generation_config.json would set its own where a field is absent.
NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
#: Fields that are not sent, and the values that say nothing. ``seed`` would make all answers of a group equal, and a
#: group of equal answers teaches nothing; the others shift or mask the logits, so that the recorded log-probabilities
#: would not be the policy's.
DROPPED: Mapping[str, tuple[Any, ...]] = {
    "seed": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "thinking_token_budget": (-1,),
}


class _Asked(BaseModel):
    """The fields as vLLM 0.28 declares them, ``null`` standing for absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    min_tokens: int | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None


#: Whether vLLM takes a value, and its words where it does not.
_BOUNDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 2, "must be in [0, 2]"),
    "top_p": (lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "top_k": (lambda value: value >= -1, "must be 0 (disable), or at least 1"),
    "min_p": (lambda value: 0 <= value <= 1, "must be in [0, 1]"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
    "repetition_penalty": (lambda value: value > 0, "must be greater than zero"),
    "min_tokens": (lambda value: value >= 0, "must be greater than or equal to 0"),
}


def check_sampling(body: Mapping[str, Any]) -> None:
    """Refuse what vLLM would refuse, for a body whose fields do not all reach vLLM.

    Raises:
        RequestError: a field has the wrong type or is out of range; in vLLM's words, and ``param`` names it.
    """
    try:
        asked = _Asked.model_validate(body)
    except ValidationError as exc:
        wrong = exc.errors()[0]
        name = str(wrong["loc"][0])
        raise RequestError(f"{name}: {wrong['msg']}", param=name) from exc
    for name, (fits, words) in _BOUNDS.items():
        value = getattr(asked, name)
        if value is not None and not fits(value):
            if name == "temperature" and value < 0:
                words = "must be non-negative"
            raise RequestError(f"{name} {words}, got {value}.", param=name)


def asked_length(body: Mapping[str, Any]) -> tuple[str, int | None]:
    """The field that bounds the answer, and the tokens that it allows; ``None`` without a bound."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (asked := body.get(name)) is not None:
            return name, asked if isinstance(asked, int) else None  # vLLM refuses anything else
    return "max_tokens", None


def not_as_asked(body: Mapping[str, Any], job: TrainJob, *, episode_type: EpisodeType | None) -> list[tuple[str, str]]:
    """Fields of a body in chat form that the answer does not heed, each with the reason.

    Args:
        body: of a request of ``job``.
        episode_type: of the episode that samples it, ``None`` without one.
    """
    notes: list[tuple[str, str]] = []
    name, asked = asked_length(body)
    limits = {"max_response_length": job.max_response_length}
    if episode_type is not None and job.max_turn_length is not None:
        limits["max_turn_length"] = job.max_turn_length
    limit = min(limits, key=lambda field: limits[field])
    if asked is not None and asked > limits[limit]:
        notes.append((name, f"answers end at {limits[limit]} tokens, raise job.{limit} for longer ones"))
    if episode_type != "train" or job.sampling == "app":
        return notes
    why = "(job.sampling is trainer)"
    for name, value in {"temperature": job.temperature, **NEUTRAL}.items():
        asked = body.get(name)
        if asked is not None and asked != value and not (name == "top_k" and asked == 0):
            notes.append((name, f"trained answers are sampled at {value:g} {why}"))
    for name, harmless in DROPPED.items():
        if (asked := body.get(name)) is not None and asked not in harmless:
            notes.append((name, f"trained answers are sampled without it {why}"))
    return notes
