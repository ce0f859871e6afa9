"""Why a trainer ended: the cause inside the errors of Ray, hydra and verl, in one line for people."""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import Any

from swarm.errors import ConfigError, EngineError, SwarmGatewayError
from swarm.link.imported import CODE_VARIABLE

_KEY_OF_HYDRA = re.compile(r"\nfull_key: \S*\s*$")


def is_final(exc: BaseException) -> bool:
    """Whether another trainer would end alike: vLLM died, or the job is at fault."""
    from adapters.verl.replicas import VllmDiedError

    # Ray's errors are of the class of their cause, too
    return isinstance(exc, ConfigError) or isinstance(innermost(exc), VllmDiedError)


def innermost(exc: BaseException) -> BaseException:
    """The innermost cause of ``exc``, through Ray's wrappers."""
    import ray.exceptions

    seen: set[int] = set()
    current: Any = exc
    while id(current) not in seen:
        seen.add(id(current))
        inner = getattr(current, "cause", None) if isinstance(current, ray.exceptions.RayTaskError) else None
        following = inner or current.__cause__
        if not isinstance(following, BaseException):
            break
        current = following
    return current


def root_cause(exc: BaseException) -> str:
    """One line for people: the innermost cause of ``exc``."""
    current = innermost(exc)
    if isinstance(current, SwarmGatewayError):
        return current.message
    if isinstance(current, ModuleNotFoundError) and os.environ.get(CODE_VARIABLE):
        return (
            f"the synced code needs the Python module {current.name!r}, which is not installed on {platform.node()}: "
            f"install it there for {sys.executable}; code sync sends no dependencies"
        )
    # hydra names the key last, and the cause before it
    text = _KEY_OF_HYDRA.sub("", str(current)).strip() or "no message"
    # of CUDA's, all that follows is advice
    leads = isinstance(current, EngineError) or text.startswith("CUDA error")
    return f"{type(current).__name__}: {text.splitlines()[0 if leads else -1]}"
