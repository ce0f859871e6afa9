"""Load an attribute by ``"module:attribute"`` or a Python file by path, with an error that says what is wrong; and the
``PYTHONPATH`` with which a Python child imports what this process runs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm.errors import ConfigError


def python_path(*first: Path) -> str:
    """``PYTHONPATH`` for a Python child: ``first``, then our own, then the checkout that we run from if it is one.

    With it a child started with ``python -P``, or with ``PYTHONSAFEPATH`` set, needs no working directory on its path:
    there may be another version of these packages, or a file named like a module. Entries are absolute and none is
    empty, since an empty one means the working directory.
    """
    root = Path(__file__).parents[1]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # installed packages are found anyway, and must not go before the standard library
    checkout = "" if root.name in ("site-packages", "dist-packages") else str(root)
    return os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in (*map(str, first), *own, checkout) if path))


def load_attribute(spec: str) -> Any:
    """Import ``module`` and return ``attribute`` of ``"module:attribute"`` (dots descend into attributes).

    Raises:
        ConfigError: the form is wrong, the module does not exist or does not import, or the attribute is missing.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{spec!r} must have the form 'module:attribute'")
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:
        raise ConfigError(f"cannot import {module_name!r} of {spec!r}: {type(exc).__name__}: {exc}") from exc
    for name in path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise ConfigError(f"module {module_name!r} has no attribute {path!r}") from None
    return target


def load_file(path: Path) -> ModuleType:
    """Execute the Python file at ``path`` as a module of its own name and return it.

    Raises:
        ConfigError: the file is missing, has a syntax error (with its line) or raises on import.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"_swarm_file_{digest}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # pickling and dataclasses look a module up by name while it executes
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as exc:
        del sys.modules[name]
        raise ConfigError(f"{exc.filename or path}, line {exc.lineno}: {exc.msg}") from exc
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}," if lines else str(path)
        raise ConfigError(f"{where} failed on import: {type(exc).__name__}: {exc}") from exc
    return module
