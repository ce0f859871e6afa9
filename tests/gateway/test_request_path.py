"""``docs/architecture.md`` names the files that one chat completion passes, and they are few."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.gateway import test_with_swarm_server as whole
from tests.gateway.conftest import Http
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig
gateway = whole.gateway

ROOT = Path(__file__).parents[2]
PRODUCT = ("gateway", "swarm", "adapters", "reward_hooks")
PAGE = ROOT / "docs" / "architecture.md"
#: product files in all processes, with the polls of `/status`, the imports that fall into the request, and two or three
#: that a timer or an earlier test of the same process adds
MOST_FILES = 83


@contextmanager
def files_called() -> Generator[set[str]]:
    """Product files, relative to the repository, of which a function runs within, in any thread; none that garbage of
    earlier tests would run."""
    noted: set[str] = set()
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            noted.add(frame.f_code.co_filename)

    gc.collect()
    gc.disable()
    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
        # threads that run still note
        names = {Path(name).relative_to(ROOT).as_posix() for name in noted.copy() if name.startswith(f"{ROOT}/")}
        found.update(name for name in names if name.split("/")[0] in PRODUCT)


async def test_the_page_names_the_files_of_a_chat_completion(rig: server.Rig, gateway: Http) -> None:
    with files_called() as files:
        answer = await gateway.post(whole.CHAT, json=whole.BODY)
        assert answer.headers["x-swarm-trained"] == "true"
        await whole.none_running(rig)
    assert {"gateway/pipeline.py", "swarm/server/episodes/pool.py"} <= files
    assert files - named_files() == set()
    assert len(files) <= MOST_FILES, " ".join(sorted(files))


def named_files() -> set[str]:
    return set(re.findall(r"`((?:gateway|swarm|adapters|reward_hooks)/[\w/]+\.py)`", PAGE.read_text()))
