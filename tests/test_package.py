"""What a user of the package gets: wheel and sdist are built, and the wheel runs in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import swarm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, ROOT]
    subprocess.run(command, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def run(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run ``swarm-gateway`` of an environment that has the wheel and what it depends on, outside the repository."""
    folder = tmp_path_factory.mktemp("user")
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "env"], check=True, timeout=60)
    [wheel] = built.glob("*.whl")
    install = [UV, "pip", "install", "--quiet", "--python", folder / "env/bin/python"]
    subprocess.run([*install, "--constraint", ROOT / "requirements/cpu.lock", wheel], check=True, timeout=300)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [folder / "env/bin/swarm-gateway", *arguments]
        home = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "SWARM_GATEWAY_HOME": str(folder / "home")}
        return subprocess.run(program, cwd=folder, env=home, capture_output=True, text=True, timeout=60)

    return command


def test_the_wheel_has_the_version_and_a_hook_that_it_makes_runs(run: Run) -> None:
    assert run("--version").stdout == f"swarm-gateway {swarm.__version__}\n"
    assert run("new", "brief").returncode == 0
    agent = "opencode_build_brief"
    tested = run("hooks", "test", agent, "--data", f"{agent}/groups.jsonl", "--json")
    assert tested.returncode == 0, tested.stderr
    assert [group["order"] for group in json.loads(tested.stdout)["groups"]], "groups are ranked"
    checked = run("serve", "--config", f"{agent}/config.yaml", "--check")
    assert checked.returncode == 0, checked.stderr


def test_without_the_engine_a_pull_says_what_to_install_before_it_downloads(run: Run) -> None:
    pulled = run("models", "pull", "smollm2-135m")
    assert pulled.returncode == 2 and "run this where the engine is installed" in pulled.stderr


def test_the_sdist_has_the_sources_and_nothing_of_a_machine(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    sources = {"adapters", "gateway", "reward_hooks", "swarm", "docs"}
    assert tops == sources | {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
