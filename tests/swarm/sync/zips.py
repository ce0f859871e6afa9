"""Zips as a foreign client makes them: every file of a folder."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path


def zipped(folder: Path) -> bytes:
    """All files below ``folder``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                writer.write(path, path.relative_to(folder).as_posix())
    return buffer.getvalue()
