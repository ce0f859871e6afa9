"""Models as ``/v1/models`` lists them, for the SDKs of OpenAI and of Anthropic alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def model_card(name: str, *, root: str | None = None, max_model_len: int | None = None) -> dict[str, Any]:
    """One model.

    Args:
        name: that callers ask for.
        root: the model behind it, default: itself.
        max_model_len: tokens that it takes, prompt and answer together; ``None``: not known.
    """
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "swarm-gateway",
        "root": root or name,
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        # required by Anthropic's SDKs; when a model's first weights were made is not known
        "created_at": "1970-01-01T00:00:00Z",
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All of them, on one page."""
    return {
        "object": "list",
        "data": list(cards),
        "has_more": False,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }
