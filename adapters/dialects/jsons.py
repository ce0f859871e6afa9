"""JSON as fast as it gets, and exactly as tolerant as the standard library's.

Invariant: what :mod:`json` can read or write (numbers beyond 64 bits, lone surrogates, deep nesting) is never refused.
"""

from __future__ import annotations

import json
from typing import Any

import orjson


def encode(data: Any) -> bytes:
    """``data`` as compact JSON in UTF-8; what UTF-8 cannot say becomes a question mark."""
    try:
        return orjson.dumps(data)
    except TypeError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def decode(data: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none.
    """
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(bytes(data) if isinstance(data, memoryview) else data)
