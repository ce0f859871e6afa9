"""``PassRule``: which requests are answered once and not trained, and the rules that are shipped for coding agents.

Invariant: a shipped rule fits only requests whose answer no later turn reads: titles, labels, and checks of whether the
model answers. What compacts a conversation is none of them: the next turns build on it.
"""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from reward_hooks.contract import RULE_NAME
from swarm.types import Model


class PassRule(Model):
    """Fits a request for which every condition that is given holds.

    Patterns are regular expressions that are searched for; ``^`` is the start of the text.
    """

    name: str = Field(pattern=RULE_NAME, description="under which the requests are counted")
    path: str | None = Field(default=None, pattern=r"^/v1/", description="such as /v1/chat/completions")
    headers: dict[str, re.Pattern[str]] = Field(
        default={}, description="by name; headers that may hold secrets or names of sessions are not seen"
    )
    system: re.Pattern[str] | None = Field(default=None, description="in the instructions before the first turn")
    tools: bool | None = Field(default=None, description="whether the request has tools")
    max_tokens: int | None = Field(default=None, ge=1, description="asks for no more tokens than that")
    max_prompt_chars: int | None = Field(default=None, ge=1, description="its texts are no longer than that together")

    @field_validator("headers")
    @classmethod
    def _lower(cls, given: dict[str, re.Pattern[str]]) -> dict[str, re.Pattern[str]]:
        return {name.lower(): pattern for name, pattern in given.items()}

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if not self.model_fields_set - {"name"}:
            raise ValueError(f"the rule {self.name!r} has no condition, so every request would pass")
        return self


#: Stands for :data:`SHIPPED` in a configuration.
AGENTS = "agents"
_SHIPPED: list[dict[str, Any]] = [
    # Claude Code: a title for each prompt of a session, and whether a key and a model answer at all
    {
        "name": "claude-title",
        "headers": {"user-agent": "^claude-cli/"},
        "system": "(?m)^Generate a concise, sentence-case title",
        "tools": False,
    },
    {
        "name": "claude-check",
        "headers": {"user-agent": "^claude-cli/"},
        "max_tokens": 1,
        "max_prompt_chars": 20,
        "tools": False,
    },
    # Codex says itself what a thread is for
    {"name": "codex-title", "headers": {"x-codex-turn-metadata": '"thread_source": ?"thread_title"'}},
    {
        "name": "opencode-title",
        "headers": {"user-agent": "^opencode/"},
        "system": "^You are a title generator",
        "tools": False,
    },
]
SHIPPED = [PassRule.model_validate(rule) for rule in _SHIPPED]
