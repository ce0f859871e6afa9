"""Load user code, by ``"module:attribute"`` or from the files of a folder, with an error that says what is wrong; and
the ``PYTHONPATH`` with which a Python child imports what this process runs. A digest says which code that was.

Invariant: files of a folder are modules of that load alone. Another load has them as they are then, whatever their
names, and code that was loaded before goes on with its own.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from swarm.errors import ConfigError

_numbers = itertools.count(1)
#: Begins the name of the package that stands for a :class:`SourceFolder` among the modules.
_FOLDER = "_swarm_folder_"
_PRODUCT = frozenset({"adapters", "gateway", "reward_hooks", "swarm"})
_INSTALLED = (
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
)
#: The digest of a module's file as it was when it was first asked for: the file may change, what runs does not.
_digests: WeakKeyDictionary[ModuleType, bytes] = WeakKeyDictionary()
#: The folder whose files run.
_loading: ContextVar[SourceFolder | None] = ContextVar("loading", default=None)


def digest_of(parts: Iterable[bytes]) -> str:
    """16 hexadecimal digits that differ where any of ``parts`` does."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def code_of(modules: Iterable[ModuleType]) -> str:
    """:func:`digest_of` the source files of ``modules`` with their names; empty if none has one."""
    digests = {digest for module in modules if (digest := _file_digest(module))}
    return digest_of(sorted(digests)) if digests else ""


def own_code() -> str:
    """:func:`code_of` what this process has imported so far, but for what is installed, and this product."""
    loaded: dict[str, Any] = {**sys.modules}  # anything may stand there, also None
    return code_of(module for module in loaded.values() if isinstance(module, ModuleType) and _is_own(module))


def _is_own(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)  # of `python -m`, which calls every module __main__, it has the name
    name = spec.name if spec is not None else module.__name__
    return name.partition(".")[0] not in _PRODUCT and not is_installed(_file(module))


def is_installed(file: str) -> bool:
    """Whether ``file`` is of Python itself or of an installed package."""
    return any(folder in file for folder in _INSTALLED)


def _file(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else ""


def _file_digest(module: ModuleType) -> bytes:
    """Of its file and the name of that; empty if it has no source file."""
    file = _file(module)
    if file and module not in _digests:
        with contextlib.suppress(OSError):
            _digests[module] = hashlib.sha256(f"{Path(file).name}\0".encode() + Path(file).read_bytes()).digest()
    return _digests.get(module, b"") if file else b""


def note_read(path: Path, text: str) -> None:
    """Let the file at ``path``, which holds ``text``, count in the digest of the folder whose load reads it."""
    if (folder := _loading.get()) is not None:
        folder.read.add(digest_of([path.name.encode(), text.encode()]).encode())


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


class SourceFolder:
    """One load of the Python files of ``path``.

    An ``import helper`` in any of them, at the top or in a function, finds ``helper.py`` or the package ``helper`` of
    the folder first, as in a script; what is installed comes second, and folders without ``__init__.py`` last. Nobody
    else's imports see these modules. ``importlib.import_module("helper")`` does not find them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        #: digests of what its modules read beside code, see :func:`note_read`
        self.read: set[bytes] = set()
        self._name = f"{_FOLDER}{next(_numbers)}"
        package = ModuleType(self._name)
        package.__path__ = [str(self._path)]
        # functions look `__import__` up here, whenever they are called
        vars(package)["__builtins__"] = {**vars(builtins), "__import__": self._import}
        sys.modules[self._name] = package
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)

    def holds(self, name: str) -> bool:
        """Whether ``name`` is a Python file or a package in the folder."""
        return f"{self._name}.{name}" in sys.modules or _source(self._path / name) is not None

    def module(self, name: str) -> ModuleType:
        """The module ``name`` (dots descend into packages), executed unless it was before.

        Raises:
            ConfigError: it, or what it imports, has a syntax error or raises on import; says the file and the line.
        """
        file = self._path / f"{name}.py"
        token = _loading.set(self)
        try:
            return importlib.import_module(f"{self._name}.{name}")
        except SyntaxError as exc:
            raise ConfigError(f"{exc.filename or file}, line {exc.lineno}: {exc.msg}") from exc
        except (Exception, SystemExit) as exc:
            frames = [
                frame
                for frame in traceback.extract_tb(exc.__traceback__)
                if Path(frame.filename).is_relative_to(self._path)
            ]
            where = f"{frames[-1].filename}, line {frames[-1].lineno}," if frames else str(file)
            raise ConfigError(f"{where} failed on import: {type(exc).__name__}: {exc}") from exc
        finally:
            _loading.reset(token)

    @property
    def code(self) -> str:
        """:func:`code_of` the modules that were loaded so far, with what they have read."""
        modules = sys.modules.copy().items()
        code = code_of(module for name, module in modules if name.startswith(f"{self._name}."))
        return digest_of([code.encode(), *sorted(self.read)]) if self.read else code

    def forget(self) -> None:
        """Let go of the modules; call it once nothing runs them any more."""
        for name in list(sys.modules):
            if f"{name}.".startswith(f"{self._name}."):
                del sys.modules[name]

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self.holds(top):
            try:
                return builtins.__import__(name, globals, locals, fromlist or (), level)
            except ModuleNotFoundError as exc:
                if level or exc.name != top or not (self._path / top).is_dir():
                    raise
        ours = f"{self._name}.{name}"
        if fromlist:
            return builtins.__import__(ours, globals, locals, fromlist)
        importlib.import_module(ours)
        return sys.modules[f"{self._name}.{top}"]


class _Finder:
    """Finds the modules of every :class:`SourceFolder`, but for folders without ``__init__.py``."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for folder in (path or ()) if fullname.startswith(_FOLDER) else ():
            base = Path(folder) / fullname.rpartition(".")[2]
            if (file := _source(base)) is not None:
                loader = _Loader(fullname, str(file))
                inside = [str(base)] if file.parent == base else None
                return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)
        return None


class _Loader(SourceFileLoader):
    """Runs a file of a :class:`SourceFolder`."""

    def get_code(self, fullname: str) -> CodeType:
        # no bytecode cache: it takes a file of the same size and second for the one that it knows
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = vars(sys.modules[module.__name__.partition(".")[0]])["__builtins__"]
        super().exec_module(module)


def module_of(name: str, beside: SourceFolder | None) -> ModuleType:
    """The module ``name``, of the folder ``beside`` if that has it."""
    if beside is not None and beside.holds(name.partition(".")[0]):
        return beside.module(name)
    return importlib.import_module(name)


def load_attribute(spec: str, beside: SourceFolder | None = None) -> Any:
    """Import ``module`` and return ``attribute`` of ``"module:attribute"`` (dots descend into attributes).

    Args:
        spec: what to load.
        beside: where the module is looked for before it is imported as any other.

    Raises:
        ConfigError: the form is wrong, the module does not exist or does not import, or the attribute is missing.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{spec!r} must have the form 'module:attribute'")
    try:
        target: Any = module_of(module_name, beside)
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:
        raise ConfigError(f"cannot import {module_name!r} of {spec!r}: {type(exc).__name__}: {exc}") from exc
    for name in path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise ConfigError(f"module {module_name!r} has no attribute {path!r}") from None
    return target


def _source(base: Path) -> Path | None:
    """The file of the package or module at ``base``, where there is one."""
    return next((file for file in (base / "__init__.py", Path(f"{base}.py")) if file.is_file()), None)
