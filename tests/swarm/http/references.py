"""What an OpenAPI document refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def references(node: Any) -> Iterator[str]:
    """Every ``$ref`` below ``node``."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)
