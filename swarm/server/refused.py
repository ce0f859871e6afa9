"""The records of requests that the engine died of: a file for each in ``refused/`` of the run folder.

Invariant: a request is refused while its file is there, so a deletion of somebody's data leaves the file and takes out
of it what it has of that person: the text, and whose it is. Only the owner may read a file, and it is whole at any
time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.files import replace_file
from swarm.subjects import Subject
from swarm.types import Notes

REFUSED = "refused"
#: Fields of a record that are somebody's: the request, whose it is (:class:`Notes`), and when it came (Unix seconds).
_OWNED = ("request", "notes", "begun")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write one file.

    Raises:
        OSError: the disk refuses it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, json.dumps(record, indent=1, ensure_ascii=False, default=str).encode())


def texts_of(run_dir: Path, subject: Subject, until: float = math.inf) -> list[Path]:
    """The files that have a request of ``subject`` which came ``until`` then."""

    def is_theirs(path: Path) -> bool:
        try:
            record = json.loads(path.read_bytes())
            return record["begun"] <= until and subject.fits(Notes.model_validate(record["notes"]))
        except (OSError, ValueError, LookupError, TypeError):
            # removed meanwhile, damaged, or without a text
            return False

    return [path for path in sorted((run_dir / REFUSED).glob("*.json")) if is_theirs(path)]


def take_out(path: Path) -> None:
    """Take out of a file what is somebody's.

    Raises:
        OSError: the disk refuses it.
    """
    record = json.loads(path.read_bytes())
    write_record(path, {name: value for name, value in record.items() if name not in _OWNED})
