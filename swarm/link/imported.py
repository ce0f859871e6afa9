"""The files that a process imports for the packages of synced code: the engine reports them, the server compares.

Invariant: the report is what the import system of that process finds, never what the process was configured to import.
"""

from __future__ import annotations

import importlib.util
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from swarm.code_snapshots.manifest import digest_of, manifest_of

#: environment variable: the folder of the synced code, which an engine imports from first; not set without synced code
CODE_VARIABLE = "SWARM_CODE"
#: beside that folder: what is known of its code; ``files`` is its manifest
ABOUT = "about.json"


class ImportedCode(Struct, frozen=True):
    """What one process finds of the synced code.

    Attributes:
        folder: where it is.
        locations: top-level name -> the file that it is imported from: a folder if there is no ``__init__.py``, empty
            if it cannot be imported.
        digest: of the synced files, as this process reads them.
    """

    folder: str
    locations: dict[str, str]
    digest: str


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


def imported(names: list[str], folder: Path) -> ImportedCode:
    """What this process finds of the code in ``folder``, whose top-level names are ``names``.

    Raises:
        OSError: a file cannot be read.
    """
    about = folder.with_name(ABOUT)
    files = list(json.loads(about.read_bytes())["files"]) if about.is_file() else None
    locations = {name: _location(name) for name in names}
    return ImportedCode(str(folder), locations, digest_of(manifest_of(folder, files)))


def _location(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    # several folders may make up one package without __init__.py; the first one has precedence
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def differences(folder: Path, digest: str, processes: Mapping[str, ImportedCode]) -> str:
    """A text that says what the processes of an engine do not import from ``folder``, or read there with another
    digest; empty if they import all of it as it was synced.

    An installed package has precedence over a folder of its name without ``__init__.py``, wherever that is on the path.
    This is an error only if the folder has files of that package; otherwise it is a folder of scripts that has the name
    by chance.

    Args:
        processes: the result of :func:`imported` in each process, by a description of the process.
    """
    names = top_level(folder)
    wrong = [
        f"{process} imports {name} from {location or 'nowhere'}"
        for process, code in processes.items()
        for name in names
        if not _is_meant(folder, name, location := code.locations.get(name, ""))
    ]
    changed = [process for process, code in processes.items() if code.digest != digest]
    if changed and not wrong:
        who = " and ".join(changed)
        wrong = [f"{who} read other files there than were synced: send them again (`code sync --force-restart`)"]
    return "; ".join(wrong)


def _is_meant(folder: Path, name: str, location: str) -> bool:
    if location and Path(location).is_relative_to(folder):
        return True
    scripts = folder / name
    if not location or not scripts.is_dir() or (scripts / "__init__.py").exists():
        return False
    other = Path(location)
    package = other if other.is_dir() else other.parent
    return not any((package / path.relative_to(scripts)).exists() for path in scripts.rglob("*.py"))
