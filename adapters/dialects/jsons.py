"""JSON with orjson's speed and the standard library's tolerance.

Invariant: what :mod:`json` can read or write (numbers beyond 64 bits, lone surrogates, deep nesting) is not refused,
except by :func:`to_json`.
"""

from __future__ import annotations

import json
from typing import Any, cast

import orjson

from swarm.errors import RequestError

#: json, not orjson, decides about objects that JSON does not have
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def encode(data: Any) -> bytes:
    """``data`` as compact JSON; a lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    try:
        return orjson.dumps(data)
    except TypeError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def to_json(body: dict[str, Any]) -> bytes:
    """``body`` as compact JSON for an upstream.

    Raises:
        RequestError: JSON or UTF-8 cannot encode it (NaN, lone surrogates).
    """
    try:
        quick = orjson.dumps(body, option=_STRICT)
    except TypeError:
        quick = b"null"
    # orjson writes NaN as null
    if b"null" not in quick:
        return quick
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"the request cannot be sent on as JSON: {exc}", code="malformed_json") from exc


def decode(data: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(bytes(data) if isinstance(data, memoryview) else data)


def object_in(text: bytes | str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is; ``None`` for anything else."""
    try:
        data: Any = decode(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", data) if isinstance(data, dict) else None


def error_in(text: bytes | str) -> dict[str, Any]:
    """The ``error`` object of an answer in OpenAI's form, or the ``message`` of one in another (of Gemini, Mistral,
    TGI, FastAPI); empty if it has none."""
    try:
        data: Any = decode(text)
    except (ValueError, RecursionError):
        return {}
    match data[0] if isinstance(data, list) and data else data:
        case {"error": dict(error)}:
            return cast("dict[str, Any]", error)
        case {"error": str(words)} | {"message": words} | {"detail": words} if words:
            return {"message": words if isinstance(words, str) else encode(words).decode()}
        case _:
            return {}
