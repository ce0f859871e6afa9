"""Where modules of the user's own, such as hooks, are imported from; a console script looks in no folder of theirs."""

from __future__ import annotations

import sys
from pathlib import Path


def import_from(folder: Path) -> None:
    """Let modules in ``folder`` be imported, as ``python -m`` lets those of the working directory."""
    path = str(folder.resolve())
    # "" stands for the working directory
    if path not in (str(Path(entry).resolve()) for entry in sys.path):
        sys.path.insert(0, path)
