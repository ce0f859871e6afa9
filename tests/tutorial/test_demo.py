"""The whole demo with real servers, hooks, app and command line; only the engine process is a stand-in."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from adapters.models.cache import Manifest, install, record_files, staging
from gateway.replay import read_report
from swarm.importer import load_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tutorial" / "opencode_build_concise_agent" / "demo.py"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the cache, and the stand-in engine for the servers that are started."""
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path / "home"))
    with staging() as workspace:
        built = workspace / "model"
        built.mkdir()
        (built / "config.json").write_text("{}")
        files = record_files(built, lambda *_: None)
        install(built, Manifest(name="smollm2-135m", source="PyPI test", licence="Apache-2.0", files=files))
    paths = [str(Path(__file__).parent / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    # the demo's own SIGTERM handler must not outlive it
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("environment")
def test_the_demo_trains_reports_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    arguments = ["demo.py", "--steps", "2", "--no-control", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    code = load_file(DEMO).main()
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert out.rstrip().splitlines()[-1].startswith("Mean reward went from ")
    assert (tmp_path / "out" / "report.png").is_file()
    trained = read_report(tmp_path / "out" / "trained")
    # the engine may finish one more step before it is stopped
    assert [point.step for point in trained.steps][:2] == [1, 2]
    assert trained.failures == {}
    assert all(0 < point.reward_mean < 1 for point in trained.steps)
    assert set(psutil.Process().children(recursive=True)) == before
    ours = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert ours == []
