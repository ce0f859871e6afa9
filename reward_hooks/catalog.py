"""Names of hooks: the built-in ones, and those of installed packages (entry points ``swarm_gateway.reward_hooks``).

Invariant: one name means one hook; a package that takes a built-in name, or two that share one, are an error.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from swarm.errors import ConfigError

#: Entry points in it name a hook as ``module:attribute``.
ENTRY_POINT_GROUP = "swarm_gateway.reward_hooks"

#: Built-in hooks: classes or functions, called with the options given.
BUILT_IN: dict[str, str] = {
    "concise": "reward_hooks.rules.concise:Concise",
    "length": "reward_hooks.rules.length:Length",
    "json": "reward_hooks.rules.format:Json",
    "matches": "reward_hooks.rules.format:Matches",
    "json_schema": "reward_hooks.rules.schema:JsonSchema",
    "language": "reward_hooks.rules.language:Language",
    "words": "reward_hooks.rules.words:Words",
    "repetition": "reward_hooks.rules.repetition:Repetition",
    "tool_calls": "reward_hooks.rules.tools:ToolCalls",
    "math": "reward_hooks.verifiable.math_answers:Math",
    "exact": "reward_hooks.verifiable.match:Exact",
    "fuzzy": "reward_hooks.verifiable.match:Fuzzy",
    "code": "reward_hooks.verifiable.code:Code",
    "consensus": "reward_hooks.consensus:Consensus",
    "feedback": "reward_hooks.feedback:UserFeedback",
    "implicit_feedback": "reward_hooks.feedback:ImplicitFeedback",
    "diversity": "reward_hooks.novelty:Diversity",
    "novelty": "reward_hooks.novelty:Novelty",
    "listwise": "reward_hooks.judges.settings:make_listwise",
    "pairwise": "reward_hooks.judges.settings:make_pairwise",
    "pointwise": "reward_hooks.judges.settings:make_pointwise",
    "score_model": "reward_hooks.judges.settings:make_score_model",
}


def find_hook(name: str) -> str:
    """The ``module:attribute`` that ``name`` stands for.

    Raises:
        ConfigError: nothing has this name, or more than one thing has.
    """
    installed = {(entry.name, entry.value) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    found = sorted(value for named, value in installed if named == name)
    if name in BUILT_IN:
        found.insert(0, BUILT_IN[name])
    if not found:
        known = ", ".join(sorted({*BUILT_IN, *(named for named, _ in installed)}))
        raise ConfigError(f"there is no hook folder or hook named {name!r}; the names are: {known}")
    if len(found) > 1:
        raise ConfigError(f"the hook name {name!r} stands for {' and '.join(found)}; use module:attribute")
    return found[0]
