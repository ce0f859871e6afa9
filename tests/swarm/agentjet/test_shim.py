"""The import shim: AgentJet's names, lazily, only where AgentJet is not installed, and why a name is not there."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from swarm.agentjet import install
from swarm.agentjet.shim import MODULES

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("no_shim")


def test_every_name_leads_to_something() -> None:
    assert install() and install()
    for module, names in MODULES.items():
        loaded = import_module(module)
        assert loaded.__all__ == sorted(names)
        for name in names:
            assert getattr(loaded, name) is not None


def test_one_name_is_one_object_wherever_it_is_imported_from() -> None:
    assert install()
    client = import_module("ajet.tuner_lib.experimental.swarm_client")
    assert client.SwarmClient is import_module("ajet.tuner_lib.experimental.as_swarm_client").SwarmClient
    assert import_module("ajet").AgentJetJob is import_module("ajet.copilot.job").AgentJetJob


@pytest.mark.parametrize(
    "statement",
    [
        "import ajet.backbone.trainer_verl",
        "from ajet.utils.thread_executors import TaskCountLimitedThreadPoolExecutor",
        "from ajet.utils import swarm_overwatch",
        "from ajet import bp",
    ],
)
def test_what_is_not_there_says_where_to_look(statement: str) -> None:
    assert install()
    with pytest.raises(ImportError, match=r"docs/agentjet\.md lists what swarm\.agentjet has"):
        exec(statement, {})


def test_a_submodule_is_found_by_its_package() -> None:
    assert install()
    space: dict[str, object] = {}
    exec("from ajet.utils import retry\nfrom ajet.schema.task import *", space)
    assert {"retry", "Task", "WorkflowOutput"} <= space.keys()
    assert not hasattr(space["retry"], "__wrapped__")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, cwd=folder, env=environ
    )


def test_agentjet_itself_wins(tmp_path: Path) -> None:
    (tmp_path / "ajet").mkdir()
    (tmp_path / "ajet/__init__.py").write_text("AgentJetJob = 'the real one'")
    (tmp_path / "script.py").write_text("import ajet; print(ajet.AgentJetJob)")
    done = run(tmp_path, "-m", "swarm.agentjet", "script.py")
    assert done.stdout == "the real one\n", done.stderr
    assert "AgentJet itself is installed" in done.stderr
    done = run(tmp_path, "-c", "from swarm.agentjet import install; print(install()); import ajet.nothing")
    assert done.stdout == "False\n"
    assert "No module named 'ajet.nothing'" in done.stderr


def test_nothing_happens_before_install(tmp_path: Path) -> None:
    probe = "import sys, swarm, swarm.client, swarm.agentjet, swarm.agentjet.yaml_job\n"
    probe += "print([m for m in sys.modules if m.startswith('swarm.agentjet')])\nimport ajet"
    done = run(tmp_path, "-c", probe)
    assert done.stdout == "['swarm.agentjet.shim', 'swarm.agentjet', 'swarm.agentjet.yaml_job']\n"
    assert "No module named 'ajet'" in done.stderr
    # and the shim alone loads none of what it leads to
    probe = "import sys, swarm.agentjet; swarm.agentjet.install(); import ajet.copilot.job\n"
    probe += "print('swarm.agentjet.job' in sys.modules)"
    assert run(tmp_path, "-c", probe).stdout == "False\n"


def test_a_script_and_a_module_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons/beside.py").write_text("WORD = 'beside'")
    (tmp_path / "lessons/train.py").write_text(
        "import sys\nfrom beside import WORD\nfrom ajet.schema.task import Task\n"
        "if __name__ == '__main__':\n    print(WORD, sys.argv, Task(main_query='q').task_id == '')"
    )
    done = run(tmp_path, "-m", "swarm.agentjet", "lessons/train.py", "--steps", "3")
    assert done.stdout == "beside ['lessons/train.py', '--steps', '3'] True\n", done.stderr
    (tmp_path / "lessons/module.py").write_text(
        "from ajet.copilot.job import AgentJetJob\nimport sys; print(sys.argv[1:])"
    )
    done = run(tmp_path, "-m", "swarm.agentjet", "-m", "lessons.module", "-x")
    assert done.stdout == "['-x']\n", done.stderr


@pytest.mark.parametrize("arguments", [(), ("-m",), ("nothing.py",), ("--help",)])
def test_a_wrong_call_says_how(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(tmp_path, "-m", "swarm.agentjet", *arguments)
    assert done.returncode == 1
    assert "usage: python -m swarm.agentjet SCRIPT" in done.stderr
