"""The whole demo with real servers, hooks, app and command line; only the engine process is a stand-in."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from gateway.replay.report import read_report
from swarm.importer import SourceFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tutorial" / "opencode_build_concise_agent" / "demo.py"


@pytest.fixture
def environment(model_and_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # the demo's own SIGTERM handler must not outlive it
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("environment")
def test_the_demo_trains_reports_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    arguments = ["demo.py", "--steps", "2", "--no-control", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    code = SourceFolder(DEMO.parent).module(DEMO.stem).main()
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
