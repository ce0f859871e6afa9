"""``docs/architecture.md`` names the files that one chat completion and one batch pass, and they are few."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from swarm.link.engine import BatchRequests, EngineEnd
from swarm.link.messages import BatchReady
from swarm.server.engine.process import EngineProcess
from tests.gateway import test_with_swarm_server as whole
from tests.gateway.conftest import Http
from tests.standins.vllm import ENGINE_MODEL
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio

overrides = server.overrides
rig = server.rig
gateway = whole.gateway

ROOT = Path(__file__).parents[2]
PRODUCT = ("gateway", "swarm", "adapters", "reward_hooks")
PAGE = ROOT / "docs" / "architecture.md"
#: 70 product files in all processes, with the polls of `/status` and the imports that fall into the request, and two
#: that a timer or an earlier test of the same process may add; one runs in a thread that Python 3.11 does not watch
MOST_FILES = 72 if sys.version_info < (3, 12) else 73
#: 28 of the server and the link, of which one runs in a thread that Python 3.11 does not watch, and 10 of the trainer
MOST_FILES_OF_A_BATCH = 37 if sys.version_info < (3, 12) else 38
#: of a timer of the server, a second after its start
OF_A_TIMER = {"swarm/server/kept.py", "swarm/checkpoints.py"}


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
    files -= OF_A_TIMER
    assert {"gateway/pipeline.py", "swarm/server/episodes/pool.py"} <= files
    assert files - named_files() == set()
    assert len(files) <= MOST_FILES, " ".join(sorted(files))


@pytest.mark.parametrize("overrides", [{"stop_grace": 0.0}])
async def test_the_page_names_the_files_of_a_batch(rig: server.Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the trainer's request for a batch that is whole until its step is on disk; verl's process is not run, and
    its files are those that the page names."""
    for task in "aabb":
        episode = await rig.claim()
        await episode.chat()
        await episode.end(task)
    rig.controller.offline("an engine on the link comes instead")
    engine: dict[str, str] = {}
    start = EngineProcess.start

    async def idle(command: Sequence[str], environ: dict[str, str], run_dir: Path) -> EngineProcess:
        engine.update(environ)
        return await start(("sleep", "60"), environ, run_dir)

    monkeypatch.setattr(EngineProcess, "start", idle)
    await rig.app.state.supervisor.start()
    with EngineEnd.from_environment("driver", engine), EngineEnd.from_environment("rollout", engine) as rollout:
        requests = BatchRequests(rollout)
        with files_called() as files:
            requests.ask([rig.vllm_address], ENGINE_MODEL, 0, 1)
            batch = None
            while batch is None:
                message = await asyncio.to_thread(rollout.receive, 30.0)
                assert message is not None
                batch = requests.take(message) if isinstance(message, BatchReady) else None
            requests.report(1, {"loss": 0.25})
            requests.ask([rig.vllm_address], ENGINE_MODEL, 1, 2)
            await rig.eventually(lambda: rig.controller.engine.policy_version == 1)
            await rig.controller.episodes.synced()
    await rig.app.state.supervisor.stop()
    files -= OF_A_TIMER
    assert {"swarm/link/server.py", "swarm/server/episodes/pool.py"} <= files
    assert files - named_files() == set()
    section = PAGE.read_text().partition("\n## A batch\n")[2].partition("\n## ")[0]
    trainers = {name for name in named_files(section) if name.startswith("adapters/verl/")}
    assert len(files | trainers) <= MOST_FILES_OF_A_BATCH, " ".join(sorted(files | trainers))


def named_files(text: str | None = None) -> set[str]:
    """Product files that the page names, or ``text`` of it."""
    names = re.findall(r"`((?:gateway|swarm|adapters|reward_hooks)/[\w/]+\.py)`", text or PAGE.read_text())
    return set(names)
