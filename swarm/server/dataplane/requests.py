"""What the caller asks for, and the body that goes to vLLM for it: of a chat, or of a raw prompt.

Invariant: unknown fields are forwarded unchanged; a train episode samples from the policy itself
(:mod:`swarm.sampling`), and ``left_out`` says what of the request it does not heed. The exception is constrained
decoding (``response_format``, ``structured_outputs``, a forced tool call): an agent that cannot parse the
answer learns nothing from it, so the grammar stays, and what it masks is the one difference from the policy.

A raw prompt (a text, or token ids, in place of ``messages``) goes to ``/v1/completions`` and is recorded like a chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from swarm.errors import RequestError
from swarm.job import TrainJob
from swarm.protocol import EpisodeType
from swarm.sampling import DROPPED, NEUTRAL, asked_length, check_sampling, not_as_asked
from swarm.tokens import EARLIER_IDS

#: Answers of one call: vLLM's own bound (``VLLM_MAX_N_SEQUENCES``).
_MOST_SAMPLES = 16_384
#: vLLM's default for ``max_tokens`` of ``/v1/completions``.
_COMPLETION_TOKENS = 16
#: Fields that only a chat has.
_CHAT_ONLY = ("include_reasoning", "top_logprobs", "max_completion_tokens")

#: Types of content parts that a prompt's token ids represent in full.
_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking", "tool_reference"))

#: Fields that a continuation through /v1/completions shares with the chat request.
_CONTINUED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "cache_salt",
    "vllm_xargs",
    "priority",
    "user",
)


@dataclass(frozen=True, slots=True)
class Wants:
    """What the caller asked to see; everything else that we ask vLLM for is removed from the answer."""

    stream: bool
    token_ids: bool
    logprobs: bool
    usage_chunk: bool
    reasoning: bool


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One chat call: ``body`` is for vLLM, ``model_name`` is the model's name in the answer.

    ``max_tokens`` bounds the answer, ``context`` prompt and answer together, both in tokens. ``raw`` marks a raw
    prompt. ``not_text`` names the type of a content part that is not text, and is empty without one: the trainer gets
    token ids alone, so such a call is never trained. ``left_out`` are the fields that the answer does not heed, with
    the reasons.
    """

    body: dict[str, Any]
    wants: Wants
    model_name: str
    samples: int
    record: bool
    continuable: bool
    max_tokens: int
    context: int
    raw: bool = False
    not_text: str = ""
    left_out: Sequence[tuple[str, str]] = ()

    @property
    def path(self) -> str:
        """vLLM's path."""
        return "/v1/completions" if self.raw else "/v1/chat/completions"

    def room(self, prompt_tokens: int) -> int:
        """The most tokens that an answer to a prompt of this length may have."""
        return min(self.max_tokens, self.context - prompt_tokens)

    def continuation(self, prompt_ids: list[int], response_ids: list[int]) -> dict[str, Any]:
        """The /v1/completions body that continues after ``response_ids``: exactly, but for presence and frequency
        penalties, which vLLM counts over what this body samples, and a seed, from which it draws anew."""
        body = {key: self.body[key] for key in _CONTINUED if key in self.body}
        done = len(response_ids)
        return body | {
            "model": self.body["model"],
            "prompt": [*prompt_ids, *response_ids],
            "max_tokens": self.room(len(prompt_ids)) - done,
            "min_tokens": max(0, int(self.body.get("min_tokens") or 0) - done),
            "logprobs": self.body["logprobs" if self.raw else "top_logprobs"],
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def prepare(
    body: Mapping[str, Any],
    episode_type: EpisodeType | None,
    job: TrainJob,
    engine_model: str,
    group_size: int | None = None,
    *,
    record: bool = True,
) -> ChatCall:
    """Read the caller's chat body or raw prompt, and build vLLM's.

    The caller's ``model`` is ignored: an episode's address has one model, and agents written for AgentJet send
    placeholders.

    Args:
        body: the request body of a chat, or with a ``prompt``.
        episode_type: train episodes sample as the trainer assumes; others sample as the caller asks.
        job: has the served name, lengths and temperature.
        engine_model: the name under which vLLM serves.
        group_size: for a call that samples one answer for each episode of a group.
        record: ``False``: sample as for ``episode_type``, but for no episode.

    Raises:
        RequestError: there are neither messages nor a prompt, ``stream`` is not a boolean, ``n`` is beyond vLLM's
            bound, above 1 in a train episode, or not the size of the group; or vLLM would refuse a sampling field that
            does not reach it.
    """
    has_prompt, messages = _has_prompt(body), body.get("messages")
    if not has_prompt and (not isinstance(messages, list) or not messages):
        raise RequestError("messages: a non-empty list of messages is required", param="messages")
    if not isinstance(body.get("stream"), bool | None):
        raise RequestError("stream: must be true or false", param="stream")
    train = episode_type == "train"
    samples: Any = body.get("n") or group_size or 1
    if not isinstance(samples, int) or not 1 <= samples <= _MOST_SAMPLES:
        raise RequestError(f"n: must be an integer from 1 to {_MOST_SAMPLES}", param="n")
    if group_size is not None and samples != group_size:
        raise RequestError(
            f"n: a call of this group samples {group_size} answers, one for each of its episodes; leave n out",
            param="n",
        )
    if group_size is None and train and samples != 1:
        raise RequestError("n: a train episode gives one answer per call; claim one episode for each answer", param="n")
    options = _mapping(body.get("stream_options"))
    wants = Wants(
        stream=body.get("stream") is True,
        token_ids=body.get("return_token_ids") is True,
        logprobs=bool(body.get("logprobs")),
        usage_chunk=options.get("include_usage") is True,
        reasoning=has_prompt or body.get("include_reasoning") is not False,
    )
    ours: dict[str, Any] = {
        "model": engine_model,
        # an aborted answer is continued from them
        "return_token_ids": True,
        # of a text that is held back, they alone say whether it ends within a character
        "logprobs": wants.logprobs or (record and episode_type is not None) or (wants.stream and holds_text(body)),
        # with null, vLLM would send no log-probabilities
        "top_logprobs": (body.get("top_logprobs") or 0) if wants.logprobs else 0,
        # with a reasoning parser, hiding the reasoning would hide the token ids as well
        "include_reasoning": True,
    }
    sent = {**body, **ours}
    # the server's to say
    sent.pop(EARLIER_IDS, None)
    # vLLM tells by it what was sampled before weights changed: no two calls may have one
    sent.pop("request_id", None)
    if group_size is not None:
        sent["n"] = group_size
    if wants.stream:
        # without usage, vLLM heeds none of the others
        sent["stream_options"] = {**(options if wants.usage_chunk else {}), "include_usage": True}
    # Without a length none is sent: vLLM then allows what fits into the context, up to max_response_length (verl starts
    # it with that limit), whereas with an explicit length it refuses each prompt that leaves less room.
    limit = asked = asked_length(body)[1]
    turn = job.max_turn_length if episode_type is not None else None
    if turn is not None and turn < job.max_response_length and (asked is None or asked > turn):
        asked = turn
        sent.pop("max_completion_tokens", None)
        sent["max_tokens"] = turn
    elif asked is not None and asked >= job.max_response_length:
        # the engine's own limit (verl sizes its tensors by it): the same as asking for none
        asked = None
        sent.pop("max_tokens", None)
        sent.pop("max_completion_tokens", None)
    if episode_type == "eval":
        sampling = job.eval_sampling.model_dump(exclude_none=True)
        sent |= {name: value for name, value in sampling.items() if body.get(name) is None}
    if train and job.sampling == "trainer":
        check_sampling(body)
        sent |= {"temperature": job.temperature, **NEUTRAL}
        for key in DROPPED:
            sent.pop(key, None)
    max_tokens = job.max_response_length if asked is None else asked
    not_text = _not_text(messages)
    if has_prompt:
        if limit is None:
            max_tokens = min(_COMPLETION_TOKENS, max_tokens)
        sent = {name: value for name, value in sent.items() if name not in _CHAT_ONLY}
        sent |= {"logprobs": ours["top_logprobs"], "max_tokens": max_tokens}
    return ChatCall(
        body=sent,
        wants=wants,
        model_name=job.model_name,
        samples=samples,
        record=train and record,
        continuable=_plain_text(body) and not not_text,
        max_tokens=max_tokens,
        context=job.max_model_len,
        raw=has_prompt,
        not_text=not_text,
        left_out=not_as_asked(body, job, episode_type=episode_type),
    )


def stops_of(body: Mapping[str, Any]) -> list[str]:
    """The texts that end an answer."""
    stop: Any = body.get("stop")
    # vLLM refuses what is none of these
    texts = [stop] if isinstance(stop, str) else cast("list[Any]", stop) if isinstance(stop, list) else []
    return [text for text in texts if isinstance(text, str)]


def holds_text(body: Mapping[str, Any]) -> bool:
    """Whether vLLM holds the end of a text back until it knows that none of :func:`stops_of` begins there."""
    return max(map(len, stops_of(body)), default=0) > 1 and not body.get("include_stop_str_in_output")


def _has_prompt(body: Mapping[str, Any]) -> bool:
    """Whether ``body`` has a raw prompt in place of messages.

    Raises:
        RequestError: it has both, or its prompt is neither a text nor token ids.
    """
    prompt: Any = body.get("prompt")
    if prompt is None:
        return False
    if body.get("messages") is not None:
        raise RequestError("prompt: messages and a raw prompt exclude each other", param="prompt")
    if isinstance(prompt, str) and prompt:
        return True
    ids = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise RequestError("prompt: must be one text that is not empty, or its token ids", param="prompt")
    return True


def _not_text(messages: Any) -> str:
    """The type of a content part of ``messages`` that is not text (images, audio, video, embeddings), or ``""``."""
    for message in cast("list[Any]", messages or []):
        content = _mapping(message).get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else []:
            fields = _mapping(part)
            # vLLM looks for media in a part without a type and in any part with a uuid
            if isinstance(part, str) or (fields.get("type") in _TEXT_PARTS and "uuid" not in fields):
                continue
            return str(fields.get("type") or "untyped")
    return ""


def _plain_text(body: Mapping[str, Any]) -> bool:
    """Whether the answer is free text, so that no tool or grammar state is lost between two requests."""
    tools = body.get("tools") and body.get("tool_choice") != "none"
    kind = _mapping(body.get("response_format")).get("type", "text")
    constrained = any(body.get(key) for key in ("structured_outputs", "guided_json", "guided_regex", "guided_choice"))
    return not tools and kind == "text" and not constrained and not body.get("echo")


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
