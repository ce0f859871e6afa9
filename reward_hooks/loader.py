"""Load hooks from a folder or from ``module:attribute``.

Invariant: whatever is wrong with hooks is a ``ConfigError`` before anything starts, with file, line and what to do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from reward_hooks.contract import PARAMETERS, REWARD, SESSION_END, SUBMIT, Hooks, RewardHook, SessionHook, SubmitHook
from swarm.errors import ConfigError
from swarm.importer import load_attribute, load_file


def load_hooks(spec: str | Path) -> Hooks:
    """The hooks that ``spec`` names.

    Files beside the hooks can be imported by their names (``from helper import grade``): the folder stays on
    ``sys.path``, at its end, so an installed module of the same name goes first. They are modules of the process like
    any other: two hook folders in one process share those of the same name.

    Args:
        spec: a folder with ``on_compute_relative_reward.py`` and perhaps ``on_user_submit_new_requests.py`` and
            ``on_session_end.py``, or ``module:attribute``, the attribute being a module, an object or a ``Hooks`` with
            functions of these names.

    Raises:
        ConfigError: nothing is there, a file does not load, a function is missing or has the wrong parameters.
    """
    text = str(spec)
    if Path(spec).is_dir():
        return _from_folder(Path(spec))
    if Path(spec).exists():
        raise ConfigError(f"{text} is a file; name the folder that holds {REWARD}.py, or use module:attribute")
    if ":" not in text or "/" in text:
        raise ConfigError(
            f"there is no hook folder {text}; name a folder that holds {REWARD}.py, or use module:attribute "
            "like reward_hooks.rules.concise:hooks"
        )
    return _from_object(load_attribute(text), text)


def _from_folder(folder: Path) -> Hooks:
    # for good, because a hook may import when it is called; last, because a sibling named like a module that this
    # process has yet to import must not take its place
    if (siblings := str(folder.resolve())) not in sys.path:
        sys.path.append(siblings)
    if not (folder / f"{REWARD}.py").is_file():
        raise ConfigError(f"{folder} holds no {REWARD}.py; add one that defines {_usage(REWARD)}")
    found = {
        name: _function(load_file(file), name, str(file))
        for name in PARAMETERS
        if (file := folder / f"{name}.py").is_file()
    }
    return _hooks(found, str(folder))


def _from_object(target: object, spec: str) -> Hooks:
    if isinstance(target, Hooks):
        return target
    if inspect.isclass(target):
        raise ConfigError(f"{spec} is a class; name an instance of it")
    found = {
        name: _function(target, name, spec)
        for name in PARAMETERS
        if name == REWARD or getattr(target, name, None) is not None
    }
    return _hooks(found, spec)


def _hooks(found: Mapping[str, Any], source: str) -> Hooks:
    return Hooks(
        cast(RewardHook, found[REWARD]),
        cast("SubmitHook | None", found.get(SUBMIT)),
        source=source,
        session_end=cast("SessionHook | None", found.get(SESSION_END)),
    )


def _function(holder: object, name: str, where: str) -> Any:
    function: Any = getattr(holder, name, None)
    if function is None:
        raise ConfigError(f"{where}: defines no {name}; add {_usage(name)}")
    if not callable(function):
        raise ConfigError(f"{where}: {name} is a {type(function).__name__}, not a function; define {_usage(name)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins and some C functions have none; the first call will tell
        return function
    try:
        signature.bind(*PARAMETERS[name])
    except TypeError:
        line = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_firstlineno", None)
        place = f"{where}, line {line}" if line else where
        raise ConfigError(f"{place}: {name}{signature} has the wrong parameters; define {_usage(name)}") from None
    return function


def _usage(name: str) -> str:
    return f"`def {name}({', '.join(PARAMETERS[name])})`"
