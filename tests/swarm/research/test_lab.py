"""How runs end early on a real swarm server, and what costs no attempt; only the engine stands in for verl."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import threading
import zipfile
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from swarm.client import SwarmClient
from swarm.research.lab import Lab, OnEvent, StudyProcess
from swarm.research.ledger import Ledger, State
from swarm.research.running import Runner, begin
from swarm.research.study import read_study
from swarm.states import EngineState
from tests.ports import free_ports
from tests.swarm.research.learner import DIVERGING, STALLING
from tests.swarm.research.making import declared, told
from tests.swarm.research.storm import server, study_at

pytestmark = pytest.mark.slow

#: The first evaluation ends like a process that the system kills.
FLAKY = """
import os
from pathlib import Path

if not (marker := Path({marker!r})).exists():
    marker.touch()
    os._exit(137)
"""


def declare(folder: Path, url: str, **changes: Any) -> Path:
    """A study of two steps whose hours end with its base run."""
    job = {**declared()["job"], "total_training_steps": 2, **changes.pop("job", {})}
    return study_at(folder, [url], job=job, budget={"runs": 20, "hours": 1e-6}, **changes)


def ran(folder: Path, on_event: OnEvent = lambda kind, values: None) -> State:
    """The end of a study that runs its base alone."""
    study = read_study(folder)
    with Ledger(folder) as ledger:
        begin(study, folder, ledger)
        lab = Lab(study, folder, ledger.state, None, on_event)
        Runner(study, folder, ledger, lab, lambda kind, values: None).run(threading.Event())
        assert list(ledger.state.runs) == ["base"] and ledger.state.finished
        return ledger.state


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_a_metric_that_is_no_number_ends_a_run(tmp_path: Path, url: str) -> None:
    base = ran(declare(tmp_path / "study", url, job={"lr": DIVERGING})).runs["base"]
    assert (base.outcome, base.why) == ("failed", "NaN: a metric of step 1 is not finite")
    # the second step may be there before anybody looks
    assert base.attempt == 1 and base.steps in (1, 2)


def test_a_run_without_steps_ends(tmp_path: Path, url: str) -> None:
    changes = {"job": {"lr": STALLING}, "early_stop": {"stall_seconds": 1.0}}
    base = ran(declare(tmp_path / "study", url, **changes)).runs["base"]
    assert base.outcome == "failed" and base.why.startswith("stalled: no step for 1 s")
    with SwarmClient(url) as client:
        assert client.status().engine.engine_status is EngineState.OFFLINE


def test_code_is_synced_an_evaluation_is_made_again_and_hours_end_a_study(tmp_path: Path, url: str) -> None:
    folder = declare(tmp_path / "study", url, sync_packages=["agent"])
    with (folder / "evaluate.py").open("a") as file:
        file.write(FLAKY.format(marker=str(tmp_path / "evaluated")))
    state = ran(folder)
    base = state.runs["base"]
    assert (tmp_path / "evaluated").exists()
    assert (base.outcome, base.attempt, sorted(base.scores)) == ("done", 1, [0, 2])
    assert state.exhausted == "the budget for first runs is used: no more hours" and state.hours > 0
    with SwarmClient(url) as client:
        sent = client.code_archive(client.runs().runs[-1].code or "")
    assert zipfile.ZipFile(io.BytesIO(sent)).namelist() == ["agent.py"], "neither evaluator nor held-out tasks"


def test_a_run_whose_server_is_started_again_while_its_engine_boots_is_begun_again(tmp_path: Path) -> None:
    place, boots, killed = tmp_path / "server", threading.Event(), threading.Event()
    [port] = free_ports(1)
    place.mkdir()
    os.mkfifo(place / "gate")

    def hold() -> None:
        with (place / "gate").open("w"):  # which waits for the engine
            boots.set()
            killed.wait(60)

    threading.Thread(target=hold, daemon=True).start()
    with ThreadPoolExecutor(1) as pool:
        with server(place, port, signal.SIGKILL) as url:
            running = pool.submit(ran, declare(tmp_path / "study", url))
            assert boots.wait(60)
        (place / "gate").unlink()
        killed.set()
        with server(place, port):
            base = running.result(120).runs["base"]
    assert (base.attempt, base.outcome) == (2, "done")
    assert [one["step"] for one in told(place / "steps.jsonl")] == [0, 0, 1, 2]


class Line:
    """A line to ``port`` that breaks with all that is under way, until the lab has asked ``most`` times in vain."""

    def __init__(self, port: int, most: int) -> None:
        self._port, self._left = port, most
        self._open: list[socket.socket] = []
        self._broken = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self) -> None:
        if not self._broken:
            self._broken = True
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            ours, _ = self._listening.accept()
            threading.Thread(target=self._connect, args=(ours,), daemon=True).start()

    def _connect(self, ours: socket.socket) -> None:
        with ours, suppress(OSError):
            first = ours.recv(65536)
            if self._broken and self._left:
                # the episodes' process asks for no steps
                self._left -= b"steps=1000" in first
                return
            with socket.create_connection(("127.0.0.1", self._port)) as theirs:
                self._open += [ours, theirs]
                theirs.sendall(first)
                threading.Thread(target=self._pass_on, args=(ours, theirs), daemon=True).start()
                self._pass_on(theirs, ours)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_line_that_is_down_for_seconds_costs_no_attempt(tmp_path: Path, url: str) -> None:
    # one status is five tries, and each of them up to two connections
    line = Line(int(url.rpartition(":")[2]), most=11)

    def fail(kind: str, values: Mapping[str, Any]) -> None:
        if values.get("words") == "evaluates":
            line.fail()

    base = ran(declare(tmp_path / "study", line.url), fail).runs["base"]
    assert (base.attempt, base.outcome) == (1, "done")


def test_what_python_prints_at_its_start_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "print('welcome to the cluster')\nprint(1, flush=True)\nsys.stdout.buffer.write(b'\\xff\\n')\n"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{printed}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with StudyProcess("train", "no order", tmp_path / "log") as process:
        assert process.next(30.0) == {}, "its end is not seen"


def test_a_process_that_has_ended_is_left_where_it_takes_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in macOS."""

    kill = os.killpg

    def refuse(group: int, number: int) -> None:
        if group == child._process.pid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        # another test's process may be collected as garbage just now, which kills it and waits for its end
        kill(group, number)

    child = StudyProcess("train", "-", tmp_path / "log")
    monkeypatch.setattr(os, "killpg", refuse)
    with pytest.raises(LookupError, match="why it failed"), child:
        assert child.next(30.0) == {}
        raise LookupError("why it failed")
