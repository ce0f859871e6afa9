"""vLLM's plain answer, read by type: numbers for the record, and what the caller is to see of the rest.

A group's answer is mostly the log-probabilities of its tokens, each in an object with the token's text and bytes; read
as dicts, they take longer than everything else that is done for a group. Invariant: the quick way gives what the slow
way would give, and an answer of any other form than vLLM's own is read the slow way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, cast

from msgspec import UNSET, Meta, Struct
from msgspec.json import Decoder

from swarm.server.dataplane.pieces import pieces_of
from swarm.server.dataplane.recording import Sampled
from swarm.server.dataplane.requests import ChatCall
from swarm.server.dataplane.upstream import decoded

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """A chat answer.

    Attributes:
        body: what vLLM said, with ``pieces`` in its choices where the call asks for them. Log-probabilities that the
            caller does not ask for may be missing.
        sampled: the tokens of its choices, where they were read by type; else they are in ``body``.
    """

    body: Body
    sampled: list[Sampled] | None


def read(content: bytes, call: ChatCall) -> PlainAnswer:
    """vLLM's answer to ``call``.

    Raises:
        ValueError: it is no JSON, or no object.
    """
    answer = _read_quickly(content, call) if _is_usual(call) else None
    return answer or _read(content, call)


def _is_usual(call: ChatCall) -> bool:
    """Whether log-probabilities come, in the form of a chat, and only to be recorded."""
    return not call.raw and call.body.get("logprobs") is True and not call.wants.logprobs


def _read(content: bytes, call: ChatCall) -> PlainAnswer:
    body = call.answer(decoded(content))
    if call.wants.pieces:
        for choice in body.get("choices") or ():
            entries: list[Body] = (choice.get("logprobs") or {}).get("content") or []
            tokens = [
                raw if (raw := entry.get("bytes")) is not None else str(entry.get("token", "")) for entry in entries
            ]
            _tell_pieces(choice, tokens)
    return PlainAnswer(body, None)


# ---------------------------------------------------------------------- the quick way


# of an entry the rest is skipped; a field that the others do not name leads to the slow way: it is the caller's
class _Entry(Struct, gc=False):
    logprob: float


class _Spelt(_Entry, gc=False):
    bytes: list[int] | None = None
    token: str = ""


# any other number is for the slow way to refuse
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
EntryT = TypeVar("EntryT", bound=_Entry)


class _Logprobs(Struct, Generic[EntryT], gc=False):
    content: list[EntryT]


class _Choice(Struct, Generic[EntryT], forbid_unknown_fields=True):
    index: int
    message: dict[str, Any]
    logprobs: _Logprobs[EntryT]
    finish_reason: str | None
    token_ids: list[_TokenId]
    stop_reason: Any = UNSET
    routed_experts: Any = UNSET


class _Answer(Struct, Generic[EntryT], forbid_unknown_fields=True):
    id: Any
    object: Any
    created: Any
    model: Any
    choices: list[_Choice[EntryT]]
    usage: dict[str, Any]
    prompt_token_ids: list[_TokenId]
    service_tier: Any = UNSET
    system_fingerprint: Any = UNSET
    prompt_logprobs: Any = UNSET
    prompt_text: Any = UNSET
    kv_transfer_params: Any = UNSET
    ec_transfer_params: Any = UNSET
    metrics: Any = UNSET


_NUMBERS = Decoder(_Answer[_Entry])
_SPELT = Decoder(_Answer[_Spelt])


def _read_quickly(content: bytes, call: ChatCall) -> PlainAnswer | None:
    """The same of the usual answer; ``None`` for others."""
    try:
        answer = (_SPELT if call.wants.pieces else _NUMBERS).decode(content)
    except ValueError:
        return None
    sampled: list[Sampled] = []
    choices: list[Body] = []
    for one in answer.choices:
        entries = one.logprobs.content
        sampled.append(Sampled(one.index, one.token_ids, [e.logprob for e in entries], one.finish_reason))
        choice = _fields(one) | {"logprobs": None}
        if call.wants.pieces:
            spelt = cast("list[_Spelt]", entries)
            _tell_pieces(choice, [entry.token if entry.bytes is None else entry.bytes for entry in spelt])
        choices.append(choice)
    return PlainAnswer(_fields(answer) | {"choices": choices}, sampled)


def _fields(struct: Struct) -> Body:
    """The fields that were there."""
    return {name: value for name in struct.__struct_fields__ if (value := getattr(struct, name)) is not UNSET}


def _tell_pieces(choice: Body, tokens: list[list[int] | str]) -> None:
    pieces = pieces_of((choice.get("message") or {}).get("content"), tokens)
    if pieces is not None:
        choice["pieces"] = pieces
