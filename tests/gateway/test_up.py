"""``run_up`` with scripted children: what it starts, tells, and leaves (nothing)."""

import os
import signal
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.up import UpPlan, run_up
from gateway.watch import UpFailedError
from swarm.errors import ConfigError
from swarm.http.serve import bind
from swarm.job import TrainJob

pytestmark = pytest.mark.slow

COMMAND = UpPlan.__dataclass_fields__["command"].default[:-1]


class Run:
    """Runs ``up`` in this thread; ``on`` maps an event to what happens then."""

    def __init__(self, script: str, run_dir: Path, addresses: tuple[tuple[str, int], ...] = (), **on: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.on = on
        self.run_dir = run_dir
        self.plan = UpPlan(
            job=TrainJob(model="/models/tiny", total_training_steps=100),
            swarm_section={"run_dir": str(run_dir), "port": 0},
            gateway_section={"hooks": "x:y"},
            run_dir=run_dir,
            addresses=addresses,
            boot_timeout=60.0,
            command=(*COMMAND, "tests.gateway.scripted_up", script),
        )

    def __call__(self) -> list[str]:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            run_up(self.plan, self.tell)
        finally:
            left = {child.pid for child in psutil.Process().children(recursive=True)} - before
            assert not left, "up left processes behind"
        return self.kinds

    def tell(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append((kind, values))
        if action := self.on.get(kind):
            action(values)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    @property
    def commands(self) -> list[str]:
        return (self.run_dir / "commands").read_text().split()


def interrupt(number: signal.Signals = signal.SIGINT) -> Any:
    return lambda values: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_gateway_engine_and_server_in_this_order(tmp_path: Path, number: signal.Signals) -> None:
    run = Run("steps", tmp_path, step=interrupt(number))
    kinds = run()
    assert [kind for kind in kinds if kind in ("boot", "ready", "step", "stopped")] == [
        "boot",
        "ready",
        "step",
        "stopped",
    ]
    assert [values["name"] for kind, values in run.events if kind == "stopping"] == [
        "gateway",
        "engine",
        "swarm server",
    ]
    assert run.commands == ["/sync_train_config", "/start_engine", "/stop_engine"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_gateway_is_pointed_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the servers are the ones of this version, whatever packages there are where `up` is started
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("gateway", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    run = Run("steps", tmp_path, ready=interrupt())
    run()
    url = next(values["url"] for kind, values in run.events if kind == "listening" and values["name"] == "swarm server")
    assert f"serving {url}" in (tmp_path / "logs" / "gateway.log").read_text()


def test_both_servers_log_in_the_form_that_is_asked_for(tmp_path: Path) -> None:
    run = Run("steps", tmp_path, ready=interrupt())
    run.plan = replace(run.plan, log_format="json")
    run()
    for name in ("swarm", "gateway"):
        assert "--log-format json" in (tmp_path / "logs" / f"{name}.log").read_text()


def test_a_signal_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    run = Run("steps", tmp_path, listening=interrupt())
    kinds = run()
    assert "ready" not in kinds
    assert kinds[-1] == "stopped"


def test_a_dead_engine_is_reported_and_the_rest_stopped(tmp_path: Path) -> None:
    run = Run("engine-dies", tmp_path)
    with pytest.raises(UpFailedError, match="exited with code 1") as caught:
        run()
    assert caught.value.last_lines == ["CUDA [out] of memory"]
    assert run.kinds[-1] == "stopped"


def test_a_dead_gateway_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(UpFailedError, match="the gateway ended with exit code 1") as caught:
        Run("gateway-dies", tmp_path)()
    assert caught.value.last_lines == ["swarm-gateway: port 8000 on 127.0.0.1 is in use"]


def test_a_second_signal_does_not_wait_for_the_engine(tmp_path: Path) -> None:
    def again(values: dict[str, Any]) -> None:
        if values["name"] == "engine":
            # once it waits for the engine, which here takes a minute
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    run = Run("slow-stop", tmp_path, ready=interrupt(), stopping=again)
    assert run()[-1] == "stopped"


def test_files_with_secrets_are_private(tmp_path: Path) -> None:
    Run("steps", tmp_path, ready=interrupt())()
    assert stat.S_IMODE((tmp_path / "gateway.yaml").stat().st_mode) == 0o600


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port: int = taken.getsockname()[1]
        run = Run("steps", tmp_path, addresses=(("127.0.0.1", 0), ("127.0.0.1", port)))
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            run()
    assert run.kinds == []
    assert list(tmp_path.iterdir()) == []


def test_one_port_for_both_servers_is_refused(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as free:
        address = ("127.0.0.1", free.getsockname()[1])
    with pytest.raises(ConfigError, match="is in use"):
        Run("steps", tmp_path, addresses=(address, address))()


def test_a_run_folder_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run("steps", tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"run folder .*/file/run cannot be written .*; set swarm\.run_dir"):
        run()
    assert run.kinds == []
