"""Code to sync: git checkouts, and zips as a foreign client makes them."""

from __future__ import annotations

import io
import os
import subprocess
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


def git(folder: Path, *arguments: str, check: bool = True) -> bytes:
    """What a git command prints that knows no configuration but the checkout's; ``check``: it must succeed."""
    nobody = {f"GIT_{who}_{what}": "nobody@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environ = {**os.environ, **nobody, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environ, capture_output=True, check=check, timeout=60
    ).stdout


def tracked(folder: Path) -> Path:
    """``folder`` as a checkout that tracks all in it that it does not ignore."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    return folder
