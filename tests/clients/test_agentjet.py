"""AgentJet itself, from a checkout of its repository: its own client, and its tutorials under the shim, against a swarm
server whose engine is a stand-in.

``AGENTJET=FOLDER`` names the checkout (https://github.com/modelscope/AgentJet, tried with its versions of March, April
and May 2026); PyPI has only versions without a swarm client. Its text is changed where it names its authors' machines:
addresses, folders of models and data sets, and the number of epochs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from swarm.client import SwarmClient
from tests.clients import environments as env
from tests.clients.running import needs
from tests.swarm.agentjet.test_scripts import PATIENCE, ROOT, server, wait_for_step

__all__ = ["server"]

AGENTJET = Path(os.environ.get("AGENTJET", ""))
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not (AGENTJET / "ajet").is_dir(), reason="set AGENTJET to a checkout of AgentJet"),
]

MATH = Path("tutorial/example_math_swarm/math.py")
#: What the pages leave to the reader, or have on an earlier page.
READER = """
import os, re, requests
from textwrap import dedent
from ajet.copilot.job import AgentJetJob
from ajet.default_config.ajet_config_schema import AjetTaskReader, HuggingfaceDatRepo
from ajet.schema.task import Task, WorkflowOutput
from ajet.task_reader import RouterTaskReader
from ajet.tuner_lib.as_oai_baseurl_apikey import OpenaiBaseUrlAndApiKey
from ajet.tuner_lib.experimental.swarm_client import SwarmClient, run_episodes_until_all_complete
from ajet.utils.thread_executors import BoundedThreadPoolExecutor, PeriodicDrainThreadPoolExecutor
from tutorial.example_math_swarm.math import execute_agent
execute_you_agent_here = execute_agent
LOCAL_GRPO_N, LOCAL_MAX_PARALLEL, LOCAL_NUM_EPOCH, LOCAL_NUM_EPOCHN = 4, 32, 1, 1
REMOTE_ALLOCATE_GPU_PER_NODE, REMOTE_BATCH_SIZE, REMOTE_TRAIN_MODEL_01 = 8, 4, "tiny"
dataset = RouterTaskReader(
    reader_type="huggingface_dat_repo",
    reader_config=AjetTaskReader(huggingface_dat_repo=HuggingfaceDatRepo(dataset_path="DATASET")),
)
"""
#: A page, its snippets in their order (those for two servers left out), what its reader does with them, and steps.
PAGES = {
    "swarm.md": ([0, 1, 2, 3], "", 2),
    "swarm_best_practice.md": ([0, 1, 2], "", 2),
    "swarm_deepdive.md": (
        [0, 1, 2, 3, 6],
        """
for n in range(32):
    for _ in range(4):
        rollout(Task(main_query=f"{n}", metadata={"answer": "#### 1"}))
episode_uuid, _ = swarm_client.begin_episode()
assert check() is None
debug_once(Task(main_query="debug", metadata={"answer": "#### 1"}))
""",
        1,
    ),
}


def on_this_machine(text: str, url: str, folder: Path) -> str:
    """AgentJet's text with our addresses and folders."""
    text = re.sub(r"http://(localhost|your-swarm-server):10086(?=\")", url, text)
    text = re.sub(r"(['\"])/(mnt/data_cpfs|path/to)/[^'\"]*(gsm8k/main)\1", f"'{folder / 'gsm8k'}'", text)
    text = re.sub(r"(['\"])/(mnt/data_cpfs|path/to)/[^'\"]*\1", "'tiny'", text)
    return text.replace("range(1024)", "range(1)")


def snippets(page: str) -> list[str]:
    text = (AGENTJET / "docs/en" / page).read_text()
    return [
        textwrap.dedent(one) for one in re.findall(r"^[ \t]*```python\n(.*?)^[ \t]*```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.fixture
def lesson(tmp_path: Path, server: str) -> Path:
    """A folder with AgentJet's tutorial of its mathematics and a data set of its form."""
    folder = tmp_path / "lesson"
    (folder / MATH.parent).mkdir(parents=True)
    (folder / "gsm8k").mkdir()
    (folder / "gsm8k/train.jsonl").write_text(
        "".join(f'{{"question": "What is {n} and {n}?", "answer": "#### {2 * n}"}}\n' for n in range(64))
    )
    (folder / MATH).write_text(on_this_machine((AGENTJET / MATH).read_text(), server, folder))
    for package in MATH.parents:
        if (AGENTJET / package / "__init__.py").exists():
            # a package of the checkout would hide a folder of its name here
            (folder / package / "__init__.py").touch()
    return folder


def environ(server: str, *path: Path) -> dict[str, str]:
    # its client starts ajet-swarm, which is ours here
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "AJET_SWARM_URL": server,
        "PATH": commands,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "REMOTE_MODEL_PATH": "tiny",
    }


@pytest.mark.parametrize("whose", ["AgentJet's own client", "the shim"])
def test_its_tutorial_trains_as_it_stands(lesson: Path, server: str, whose: str) -> None:
    module = ".".join(MATH.with_suffix("").parts)
    if whose == "the shim":
        command, path = [sys.executable, "-m", "swarm.agentjet", "-m", module], (ROOT,)
    else:
        needs(env.AGENTJET)
        # the folder itself comes first, and the packages that are not there from the checkout
        command, path = [str(env.AGENTJET.python), "-m", module], (AGENTJET,)
    with open(lesson / "log", "w", encoding="utf-8") as log:
        running = subprocess.Popen(command, cwd=lesson, env=environ(server, *path), stdout=log, stderr=log)
    try:
        with SwarmClient(server) as client:
            # its client sleeps for seconds wherever it waits
            for step in (1, 2):
                wait_for_step(client, step)
        assert running.poll() is None, (lesson / "log").read_text()[-3000:]
    finally:
        # it has ten thousand epochs
        running.send_signal(signal.SIGKILL)
        running.wait(PATIENCE)


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_its_pages_run_as_they_stand(lesson: Path, server: str, page: str) -> None:
    chosen, more, steps = PAGES[page]
    given = snippets(page)
    parts = [given[n] for n in chosen]
    if page == "swarm_deepdive.md":
        # a snippet that returns
        parts[2] = "def check():\n" + textwrap.indent(parts[2], "    ")
    text = READER.replace("DATASET", str(lesson / "gsm8k")) + on_this_machine("\n".join(parts), server, lesson) + more
    (lesson / "page.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "swarm.agentjet", "page.py"],
        cwd=lesson,
        env=environ(server, ROOT),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with SwarmClient(server) as client:
        assert client.status().engine.global_step >= steps
