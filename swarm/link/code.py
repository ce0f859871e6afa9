"""Which files a process imports for the packages of synced code: told by the engine, compared by the server.

Invariant: what is told is the answer of that process's import system, never what the process was told to import.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path

#: the folder of the synced code that an engine is to import from first; not set without synced code
CODE_VARIABLE = "SWARM_CODE"


def top_level(folder: Path) -> list[str]:
    """Names of the modules and packages in ``folder``; one without ``__init__.py`` counts if Python files are below it.

    Raises:
        OSError: it cannot be read.
    """
    modules = {module.name for module in pkgutil.iter_modules([str(folder)])}
    folders = {
        path.name for path in folder.iterdir() if path.is_dir() and path.name.isidentifier() and any(path.rglob("*.py"))
    }
    return sorted((modules | folders) - {"__main__"})


def imported(names: Iterable[str]) -> dict[str, str]:
    """For each name the file that this process imports it from, or has; a folder if it has no ``__init__.py``, and
    empty if there is none."""
    return {name: _location(name) for name in names}


def _location(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    # several folders may make up one package without __init__.py; the first goes before the others
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def differences(folder: Path, processes: Mapping[str, Mapping[str, str]]) -> str:
    """What the processes of an engine do not import from ``folder``, for people; empty if they import all of it.

    A folder without ``__init__.py`` gives way to an installed package of its name wherever it stands on the path. That
    is an error only if it holds files of that package; else it is a folder of scripts that bears the name by chance.

    Args:
        processes: by what each process is, its answer of :func:`imported`.
    """
    return "; ".join(
        f"{process} imports {name} from {location or 'nowhere'}"
        for process, locations in processes.items()
        for name in top_level(folder)
        if not _is_meant(folder, name, location := locations.get(name, ""))
    )


def _is_meant(folder: Path, name: str, location: str) -> bool:
    if location and Path(location).is_relative_to(folder):
        return True
    scripts = folder / name
    if not location or not scripts.is_dir() or (scripts / "__init__.py").exists():
        return False
    other = Path(location)
    package = other if other.is_dir() else other.parent
    return not any((package / path.relative_to(scripts)).exists() for path in scripts.rglob("*.py"))
