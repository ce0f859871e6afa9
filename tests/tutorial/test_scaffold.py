"""What ``swarm-gateway new`` makes runs as its readme says: every command of it, in its order, with real servers, hooks
and users; only the engine process is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.reports.report import read_report
from gateway.scaffold import scaffold
from tests.tutorial.readmes import commands, run, running, with_free_ports

pytestmark = pytest.mark.slow

STEPS = 2


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A new folder, with free ports for those of its configuration and fewer steps."""
    folder = scaffold("polite_agent", tmp_path / "tutorial")
    with_free_ports(folder)
    for file in (folder / "README.md", folder / "mock_user_request.py"):
        file.write_text(file.read_text().replace("--steps 20", f"--steps {STEPS}"))
    return folder


@pytest.mark.usefixtures("model_and_engine")
def test_every_command_of_its_readme_does_what_it_says(made: Path) -> None:
    test, pull, up, users = commands((made / "README.md").read_text())
    told = run(test, made)
    assert "tau with the rank  +1.000 over 2 groups" in told
    assert "order flips" in told
    assert "smollm2-135m" in run(pull, made)
    with running(up, made):
        told = run(users, made)
    report = read_report(made / "report")
    assert (report.label, report.failures) == ("polite_agent", {})
    # the engine may finish one more step before the users stop
    assert [point.step for point in report.steps][:STEPS] == [1, 2]
    assert all(0 < point.reward_mean <= 1 for point in report.steps)
    assert (made / "report" / "report.png").is_file()
    assert "held-out prompts prove more" in told
    assert (made / "runs" / "polite_agent" / "journal.db").is_file()
