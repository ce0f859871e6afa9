"""The whole demo with real servers, hooks, app and command line; only the engine process is a stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from adapters.models.cache import Manifest, install, record_files, staging
from gateway.replay import read_report

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tutorial" / "opencode_build_concise_agent" / "demo.py"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with a model in the cache and the stand-in engine."""
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path / "home"))
    with staging() as workspace:
        built = workspace / "model"
        built.mkdir()
        (built / "config.json").write_text("{}")
        files = record_files(built, lambda *_: None)
        install(built, Manifest(name="smollm2-135m", source="PyPI test", licence="Apache-2.0", files=files))
    paths = [str(Path(__file__).parent / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_the_demo_trains_reports_and_leaves_nothing(env: dict[str, str], tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    command = [sys.executable, str(DEMO), "--steps", "4", "--no-control", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("Mean reward went from ")
    assert (tmp_path / "out" / "report.png").is_file()
    trained = read_report(tmp_path / "out" / "trained")
    # the engine may finish one more step before it is stopped
    assert [point.step for point in trained.steps][:4] == [1, 2, 3, 4]
    assert trained.failures == {}
    assert trained.steps[-1].reward_mean > trained.steps[0].reward_mean
    assert set(psutil.Process().children(recursive=True)) == before
    ours = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert ours == []
