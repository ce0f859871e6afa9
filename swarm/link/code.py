"""The files that a process imports for the packages of synced code: the engine reports them, the server compares.

Invariant: the report is what the import system of that process finds, never what the process was configured to import.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path

#: environment variable: the folder of the synced code, which an engine imports from first; not set without synced code
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
    """For each name the file that this process imports it from: a folder if there is no ``__init__.py``, empty if the
    name cannot be imported."""
    return {name: _location(name) for name in names}


def _location(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    # several folders may make up one package without __init__.py; the first one has precedence
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def differences(folder: Path, processes: Mapping[str, Mapping[str, str]]) -> str:
    """A text that says what the processes of an engine do not import from ``folder``; empty if they import all of it.

    An installed package has precedence over a folder of its name without ``__init__.py``, wherever that is on the path.
    This is an error only if the folder has files of that package; otherwise it is a folder of scripts that has the name
    by chance.

    Args:
        processes: the result of :func:`imported` in each process, by a description of the process.
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
