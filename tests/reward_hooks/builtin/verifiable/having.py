"""What a machine must have for some tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_hooks.builtin.verifiable.sandbox import Form, Sandbox
from swarm.errors import ConfigError


@contextlib.contextmanager
def folder_of_programs(*names: str) -> Iterator[Path]:
    """A folder for PATH with these programs alone, which every user may enter."""
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        Path(folder).chmod(0o755)
        for name in names:
            found = shutil.which(name)
            assert found is not None
            Path(folder, name).symlink_to(found)
        yield Path(folder)


def _missing(form: Form) -> str:
    """Why there is no such sandbox here; empty if there is one."""
    path = os.environ["PATH"]
    with folder_of_programs("prlimit") as without_bubblewrap:
        if form is Form.LANDLOCK:
            os.environ["PATH"] = str(without_bubblewrap)
        try:
            made = Sandbox().form
        except ConfigError as exc:
            return exc.message
        finally:
            os.environ["PATH"] = path
    return "" if made is form else f"there is {made}"


MISSING = {form: _missing(form) for form in (Form.NAMESPACES, Form.LANDLOCK)}
needs_sandbox = pytest.mark.skipif(
    bool(MISSING[Form.NAMESPACES]), reason=f"THE SANDBOX IS NOT TESTED HERE: {MISSING[Form.NAMESPACES]}"
)
