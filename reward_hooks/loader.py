"""Load hooks from a folder or from ``module:attribute``; what is wrong with them is said before anything starts."""

from __future__ import annotations

from reward_hooks.contract import Hooks


def load_hooks(spec: str) -> Hooks:
    """The hooks that ``spec`` names: a folder, or ``module:attribute``.

    Raises:
        ConfigError: nothing is there, a file does not load, a function is missing or has the wrong parameters.
    """
    raise NotImplementedError
