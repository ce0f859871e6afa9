"""The SDKs of OpenAI and Anthropic, imported at their first use: to import both takes seconds, in every worker."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("anthropic", "openai"):
        return import_module(name)
    raise AttributeError(name)
