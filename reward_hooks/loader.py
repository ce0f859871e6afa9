"""Load hooks from a folder, a YAML file, ``module:attribute``, or by the name of a built-in or installed hook.

Invariant: an error in hooks is a ``ConfigError`` before anything starts, with file, line and remedy. A name means one
hook: a package that takes a built-in name, or two packages that share a name, are an error.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from reward_hooks.contract import PARAMETERS, REWARD, SESSION_END, SUBMIT, Hooks
from swarm.errors import ConfigError
from swarm.importer import SourceFolder, code_of, load_attribute, module_of
from swarm.packs import required

YAML_SUFFIXES = frozenset({".yaml", ".yml"})
#: A folder without a reward file may hold this one instead.
BLEND_FILE = "hooks.yaml"


def load_hooks(
    spec: str | Path, options: Mapping[str, Any] | None = None, *, beside: SourceFolder | None = None
) -> Hooks:
    """The hooks that ``spec`` names.

    Files beside the hooks can be imported by name (``from helper import grade``). Each load runs all files of the
    folder again, and hooks that were loaded before keep theirs (see :class:`swarm.importer.SourceFolder`).

    Args:
        spec: one of

            * a folder with ``on_compute_relative_reward.py`` and perhaps ``on_user_submit_new_requests.py`` and
              ``on_session_end.py``, or with a ``hooks.yaml``;
            * a YAML file that blends hooks (see :mod:`reward_hooks.compose`);
            * ``module:attribute``, where the attribute is a module, an object or a ``Hooks`` with functions of these
              names, or a class or function that makes one of these;
            * the name of a built-in or of an entry point in the group ``swarm_gateway.reward_hooks``.
        options: keyword arguments for the class or function named.
        beside: where to look first for the module of ``module:attribute``; other modules are imported once per
            process.

    Raises:
        ConfigError: nothing is there, a file does not load, a function is missing or has the wrong parameters, or the
            options are wrong.
    """
    text, path = str(spec), Path(spec)
    if path.is_dir() or path.is_file():
        if options:
            raise ConfigError(f"{text} takes no options: only a class or function that makes hooks does")
        return _from_folder(path) if path.is_dir() else _from_file(path)
    if "/" in text or path.suffix in YAML_SUFFIXES:
        raise ConfigError(
            f"there is no hook folder {text}; name a folder that holds {REWARD}.py, a YAML file, or module:attribute "
            "like reward_hooks.builtin.rules.concise:Concise"
        )
    target = text if ":" in text else find_hook(text)
    hooks = _from_object(_made(load_attribute(target, beside), target, options), text)
    if hooks.code:
        # no copy: what was loaded from files lives as long as its hooks do
        return hooks
    # of the module alone, without what it imports
    return replace(hooks, code=code_of([module_of(target.partition(":")[0], beside)]))


def _from_file(path: Path) -> Hooks:
    if path.suffix not in YAML_SUFFIXES:
        raise ConfigError(f"{path} is a file; name the folder that holds {REWARD}.py, or use module:attribute")
    make_blend = required("blend", str(path))
    return _from_files(path.parent, lambda folder: make_blend(path, partial(load_hooks, beside=folder)))


def _made(target: Any, location: str, options: Mapping[str, Any] | None) -> Any:
    """``target``, or its result if it is a class or a function."""
    if options is None and not inspect.isclass(target) and not inspect.isfunction(target):
        return target
    if not callable(target) or isinstance(target, Hooks) or (hasattr(target, REWARD) and not inspect.isclass(target)):
        raise ConfigError(f"{location} takes no options: only a class or function that makes hooks does")
    try:
        return target(**(options or {}))
    except ConfigError:
        raise
    except TypeError as exc:
        hint = "" if options else "; options are given in a YAML file of parts, see reward_hooks.compose"
        raise ConfigError(f"{location} cannot be made with the options {dict(options or {})}: {exc}{hint}") from exc
    except (Exception, SystemExit) as exc:
        raise ConfigError(f"{location} failed to be made: {type(exc).__name__}: {exc}") from exc


def _from_folder(path: Path) -> Hooks:
    if not (path / f"{REWARD}.py").is_file():
        if (path / BLEND_FILE).is_file():
            return _from_file(path / BLEND_FILE)
        raise ConfigError(f"{path} holds no {REWARD}.py; add one that defines {_usage(REWARD)}")

    def load(folder: SourceFolder) -> Hooks:
        names = [name for name in PARAMETERS if folder.holds(name)]
        functions = {name: _function(folder.module(name), name, str(path / f"{name}.py")) for name in names}
        return _hooks(functions, path, folder.code)

    return _from_files(path, load)


def _from_files(path: Path, load: Callable[[SourceFolder], Hooks]) -> Hooks:
    """The result of ``load`` for the files of the folder ``path``, which are forgotten together with it."""
    folder = SourceFolder(path)
    try:
        hooks = load(folder)
    except BaseException:
        folder.forget()
        raise
    weakref.finalize(hooks, folder.forget).atexit = False
    return hooks


def _from_object(target: object, spec: str) -> Hooks:
    if isinstance(target, Hooks):
        return target
    names = [name for name in PARAMETERS if name == REWARD or getattr(target, name, None) is not None]
    return _hooks({name: _function(target, name, spec) for name in names}, spec)


def _hooks(functions: Mapping[str, Any], source: str | Path, code: str = "") -> Hooks:
    return Hooks(
        functions[REWARD], functions.get(SUBMIT), source=str(source), session_end=functions.get(SESSION_END), code=code
    )


def _function(holder: object, name: str, where: str) -> Any:
    function: Any = getattr(holder, name, None)
    if function is None:
        raise ConfigError(f"{where}: defines no {name}; add {_usage(name)}")
    if not callable(function):
        raise ConfigError(f"{where}: {name} is a {type(function).__name__}, not a function; define {_usage(name)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none; the first call will show
        return function
    try:
        signature.bind(*PARAMETERS[name])
    except TypeError:
        line = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_firstlineno", None)
        location = f"{where}, line {line}" if line else where
        raise ConfigError(f"{location}: {name}{signature} has the wrong parameters; define {_usage(name)}") from None
    return function


def _usage(name: str) -> str:
    return f"`def {name}({', '.join(PARAMETERS[name])})`"


#: Group of the entry points that name a hook as ``module:attribute``.
ENTRY_POINT_GROUP = "swarm_gateway.reward_hooks"

#: Built-in hooks: classes or functions, called with the options given.
BUILT_IN: dict[str, str] = {
    "concise": "reward_hooks.builtin.rules.concise:Concise",
    "length": "reward_hooks.builtin.rules.text:Length",
    "json": "reward_hooks.builtin.rules.format:Json",
    "matches": "reward_hooks.builtin.rules.format:Matches",
    "json_schema": "reward_hooks.builtin.rules.format:JsonSchema",
    "language": "reward_hooks.builtin.rules.language:Language",
    "words": "reward_hooks.builtin.rules.text:Words",
    "repetition": "reward_hooks.builtin.rules.text:Repetition",
    "tool_calls": "reward_hooks.builtin.rules.tools:ToolCalls",
    "math": "reward_hooks.builtin.verifiable.math_answers:Math",
    "exact": "reward_hooks.builtin.verifiable.match:Exact",
    "fuzzy": "reward_hooks.builtin.verifiable.match:Fuzzy",
    "code": "reward_hooks.builtin.verifiable.code:Code",
    "consensus": "reward_hooks.builtin.consensus:Consensus",
    "feedback": "reward_hooks.builtin.feedback:UserFeedback",
    "implicit_feedback": "reward_hooks.builtin.feedback:ImplicitFeedback",
    "diversity": "reward_hooks.builtin.novelty:Diversity",
    "novelty": "reward_hooks.builtin.novelty:Novelty",
    "listwise": "reward_hooks.judges.listwise:Listwise",
    "pairwise": "reward_hooks.judges.pairwise:Pairwise",
    "pointwise": "reward_hooks.judges.pointwise:Pointwise",
    "score_model": "reward_hooks.judges.score_model:ScoreModel",
}


def find_hook(name: str) -> str:
    """The ``module:attribute`` of a hook name.

    Raises:
        ConfigError: the name is unknown or ambiguous.
    """
    installed = {(entry.name, entry.value) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    targets = sorted(value for named, value in installed if named == name)
    if name in BUILT_IN:
        targets.insert(0, BUILT_IN[name])
    if not targets:
        names = ", ".join(sorted({*BUILT_IN, *(named for named, _ in installed)}))
        raise ConfigError(f"there is no hook folder or hook named {name!r}; the names are: {names}")
    if len(targets) > 1:
        raise ConfigError(f"the hook name {name!r} stands for {' and '.join(targets)}; use module:attribute")
    return targets[0]
