"""``run_up`` with scripted children: what it starts, tells, and leaves (nothing)."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from gateway.launch.children import FOLDER_VARIABLE as UP_FOLDER
from gateway.launch.plan import IncumbentPlan, ServerPlan, UpPlan
from gateway.launch.run_folder import held
from gateway.launch.servers import START_DEADLINE, Server, with_servers
from gateway.launch.up import run_up
from gateway.launch.watch import UpFailedError
from swarm.client import SwarmClient
from swarm.errors import ConfigError, ConflictError, SwarmGatewayError, UnavailableError, UpstreamError
from swarm.http.serve import bind
from swarm.importer import load_attribute
from swarm.job import TrainJob
from swarm.status import MAX_RESTARTS
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import JOB, REWARD
from tests.kill.invariants import lines
from tests.ports import free_ports
from tests.processes import children, nothing_left_behind
from tests.standins.engine import FOLDER_VARIABLE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]

COMMAND = UpPlan.__dataclass_fields__["command"].default[:-1]


def server_plan(run_dir: Path, name: str = "") -> ServerPlan:
    job = TrainJob(model="/models/tiny", total_training_steps=100)
    return ServerPlan(job, {"run_dir": str(run_dir), "port": 0}, run_dir, name, boot_timeout=60.0)


class Run:
    """Runs ``up`` in this thread; ``on`` maps an event to what happens then."""

    def __init__(self, script: str, run_dir: Path, ports: tuple[int, int] = (0, 0), **on: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.on = on
        self.run_dir = run_dir
        self.plan = UpPlan(
            servers=(replace(server_plan(run_dir), address=("127.0.0.1", ports[0])),),
            gateway_section={"hooks": "x:y"},
            gateway_address=("127.0.0.1", ports[1]),
            restart_pause=0.01,
            command=(*COMMAND, "tests.gateway.scripted_up", script),
        )

    def __call__(self) -> list[str]:
        with nothing_left_behind():
            run_up(self.plan, self.tell)
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


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.launch.up._POLL", 0.05)


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


def test_a_hangup_without_a_terminal_reaches_the_gateway_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `systemctl kill --signal=HUP`: the gateway reads its settings anew, as one of `serve` does."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    run = Run("steps", tmp_path, ready=interrupt(signal.SIGHUP), gateway_restarting=interrupt())
    assert run()[-1] == "stopped"
    # the stand-in takes no hangup
    [reason] = [values["reason"] for kind, values in run.events if kind == "gateway_restarting"]
    assert reason == "the gateway was killed by SIGHUP"


def test_a_hangup_while_the_gateway_starts_reaches_it_once_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have read its settings before somebody changed them."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    up_class = load_attribute("gateway.launch.up:_Up")
    passed_on, reload = threading.Event(), up_class.reload_gateway

    def reload_gateway(up: Any) -> None:
        reload(up)
        passed_on.set()

    def hang_up(values: dict[str, Any]) -> None:
        if values["name"] == "gateway":
            os.kill(os.getpid(), signal.SIGHUP)
            assert passed_on.wait(60)

    monkeypatch.setattr(up_class, "reload_gateway", reload_gateway)
    run = Run("steps", tmp_path, listening=hang_up, gateway_restarting=interrupt(), step=interrupt())
    assert run()[-1] == "stopped"
    [reason] = [values["reason"] for kind, values in run.events if kind == "gateway_restarting"]
    assert reason == "the gateway was killed by SIGHUP"


def test_a_reload_while_the_gateway_starts_again_reaches_it_once_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a succession, which would wait for ever for a gateway that has read its settings just before."""
    monkeypatch.setattr("gateway.launch.servers.listens", lambda address: True)  # type: ignore[reportUnknownLambdaType]
    up_class, gateways = load_attribute("gateway.launch.up:_Up"), list[Any]()
    spawn, reasons = up_class._spawn, list[str]()

    def spawned(up: Any, name: str, *more: Any) -> Any:
        child = spawn(up, name, *more)
        if name == "gateway":
            gateways.append(child)
            if len(gateways) == 2:
                up.reload_gateway()
        return child

    def restarting(values: dict[str, Any]) -> None:
        reasons.append(values["reason"])
        if len(reasons) == 2:
            interrupt()(values)

    monkeypatch.setattr(up_class, "_spawn", spawned)
    at_last = threading.Timer(60, interrupt(), [{}])
    at_last.start()
    kill = lambda values: os.kill(gateways[0].pid, signal.SIGKILL)  # type: ignore[reportUnknownLambdaType]  # noqa: E731
    assert Run("steps", tmp_path, ready=kill, gateway_restarting=restarting)()[-1] == "stopped"
    at_last.cancel()
    assert reasons == ["the gateway was killed by SIGKILL", "the gateway was killed by SIGHUP"]


def test_the_job_is_there_before_the_gateway_asks_for_it(tmp_path: Path) -> None:
    # a gateway that has seen a server without a job may say so to an app that asks at «ready»
    known: dict[str, list[str]] = {}
    run = Run("steps", tmp_path, ready=interrupt())
    run.on["listening"] = lambda values: known.update(
        {values["name"]: run.commands if (tmp_path / "commands").exists() else []}
    )
    run()
    assert known == {"swarm server": [], "gateway": ["/sync_train_config"]}


def test_both_servers_are_of_this_version_and_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # whatever packages there are in the folder where `up` is started
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("gateway", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    run = Run("steps", tmp_path, ready=interrupt())
    run.plan = replace(run.plan, log_format="json")
    run()
    logs = {name: (tmp_path / "logs" / f"{name}.log").read_text() for name in ("swarm", "gateway")}
    url = next(values["url"] for kind, values in run.events if kind == "listening" and values["name"] == "swarm server")
    assert f"serving all {url}" in logs["gateway"]
    assert all("--log-format json" in log for log in logs.values())
    assert stat.S_IMODE((tmp_path / "gateway.yaml").stat().st_mode) == 0o600, "it may hold secrets"


def test_a_signal_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    run = Run("steps", tmp_path, listening=interrupt())
    kinds = run()
    assert "ready" not in kinds
    assert kinds[-1] == "stopped"


def test_an_engine_that_dies_is_started_again(tmp_path: Path) -> None:
    run = Run("dies-once", tmp_path, recovered=interrupt())
    kinds = run()
    told = [kind for kind in kinds if kind in ("ready", "restarting", "recovered", "stopped")]
    assert told == ["ready", "restarting", "recovered", "stopped"]
    values = next(values for kind, values in run.events if kind == "restarting")
    assert values["reason"] == "the engine process exited with code 1"
    assert (values["attempt"], values["of"], values["last_lines"]) == (1, 5, ["CUDA [out] of memory"])
    assert run.commands == ["/sync_train_config", "/start_engine", "/start_engine", "/stop_engine"]


@pytest.mark.parametrize(
    ("script", "starts", "why"),
    [
        ("never-up", 1, "exited with code 1"),
        ("wrong-config", 1, "its configuration is wrong"),
        ("model-gone", 2, "there is no folder /models/tiny"),
        ("dies-always", 6, r"exited with code 1 \(it was started again 5 times"),
    ],
)
def test_an_engine_that_is_given_up_ends_it_with_the_reason(tmp_path: Path, script: str, starts: int, why: str) -> None:
    run = Run(script, tmp_path)
    with pytest.raises(UpFailedError, match=why) as caught:
        run()
    assert caught.value.last_lines == ["CUDA [out] of memory"]
    assert caught.value.exit_code == (2 if script == "wrong-config" else 1)
    assert run.commands.count("/start_engine") == starts and run.kinds[-1] == "stopped"


def test_a_server_that_dies_of_a_command_is_no_mistake_in_the_file(tmp_path: Path) -> None:
    run = Run("server-dies-first", tmp_path)
    with pytest.raises(UpFailedError, match="the swarm server ended with exit code 1") as caught:
        run()
    assert caught.value.exit_code == 1 and run.kinds[-1] == "stopped"


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (ConflictError("it boots already", code="engine_not_offline"), [True]),
        (UnavailableError("no answer within 10 s"), [False, True]),
        (UpstreamError("HTTP 500"), [False, True]),
    ],
)
def test_an_engine_that_somebody_started_and_a_server_that_is_late_end_nothing(
    tmp_path: Path, error: SwarmGatewayError, asked: list[bool]
) -> None:
    # while incumbents boot, the servers are there for anybody
    errors, events, child = [error], list[str](), cast("Any", None)
    server = Server(server_plan(tmp_path), child, lambda kind, _: events.append(kind), 0.01)

    def start_engine(*, wait: bool) -> None:
        if errors:
            raise errors.pop()

    server.client = cast("Any", SimpleNamespace(start_engine=start_engine))
    for expected in asked:
        server.start_engine()
        assert server.engine_asked is expected
    assert events == ["starting"]


def test_an_engine_that_a_client_stopped_is_left_to_it(tmp_path: Path) -> None:
    run = Run("stopped", tmp_path, engine_stopped=interrupt())
    assert "restarting" not in run()
    assert run.commands.count("/start_engine") == 1


def test_ctrl_c_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    run = Run("dies-always", tmp_path, restarting=interrupt())
    run.plan = replace(run.plan, restart_pause=60.0)
    assert run()[-1] == "stopped"
    assert run.commands.count("/start_engine") == 1


class Users:
    """Ask the gateway without a pause until ``up`` is interrupted, which they do once all has been seen."""

    def __init__(self, count: int) -> None:
        self.url = ""
        self.refused, self.recovered, self.enough = threading.Event(), threading.Event(), threading.Event()
        self.trained_again = threading.Event()
        self.answers: list[httpx.Response] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def start(self, values: dict[str, Any]) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.enough.set()
        for thread in self._threads:
            thread.join(90)

    def _ask(self) -> None:
        body = {"model": "stand-in", "messages": [{"role": "user", "content": "hello"}]}
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as http:
            while not self.enough.is_set():
                after = self.recovered.is_set()
                try:
                    answer = http.post("/v1/chat/completions", json=body)
                except httpx.HTTPError as exc:
                    self.failures.append(repr(exc))
                    return
                self.answers.append(answer)
                if answer.status_code == 503:
                    self.refused.set()
                if after and answer.headers.get("x-swarm-trained") in ("true", "pending"):
                    self.trained_again.set()


def test_an_engine_that_never_comes_up_leaves_those_whom_an_upstream_answers(tmp_path: Path) -> None:
    run = Run("never-up", tmp_path, engine_given_up=interrupt())
    [server] = run.plan.servers
    run.plan = replace(run.plan, servers=(replace(server, is_spared=True),))
    kinds = run()
    assert kinds.count("restarting") == MAX_RESTARTS and "gateway_restarting" not in kinds
    assert kinds.index("engine_given_up") < kinds.index("stopping")
    [given_up] = [values for kind, values in run.events if kind == "engine_given_up"]
    assert given_up["message"].startswith(
        "the engine went offline: the engine process exited with code 1 (it was started"
    )


def test_a_trainer_killed_under_traffic_comes_back_and_the_gateway_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    users = Users(4)
    steps: list[str] = []

    def listening(values: dict[str, Any]) -> None:
        if values["name"] == "gateway":
            users.url = values["url"]

    def step(values: dict[str, Any]) -> None:
        if not steps:
            os.kill(started()[-1]["started"], signal.SIGKILL)
        steps.append(values["batch_id"])
        if users.recovered.is_set():
            assert users.trained_again.wait(60), "nobody was answered by the engine that came back"
            users.join()
            interrupt()(values)

    def restarting(values: dict[str, Any]) -> None:
        assert users.refused.wait(60), "nobody was told to come later"

    def recovered(values: dict[str, Any]) -> None:
        steps_before.extend(steps)
        users.recovered.set()

    def started() -> list[dict[str, Any]]:
        return [line for line in lines(tmp_path / "engine.jsonl") if "started" in line]

    steps_before: list[str] = []
    run = Run(
        "paced",
        tmp_path / "run",
        listening=listening,
        ready=users.start,
        step=step,
        restarting=restarting,
        recovered=recovered,
    )
    hooks = write_hooks(tmp_path / "hooks", REWARD)
    settings = {"hooks": str(hooks), "port": 0, "offline_wait_seconds": 0.2, "claim_wait_seconds": 5.0}
    [server] = run.plan.servers
    run.plan = replace(run.plan, servers=(replace(server, job=JOB),), gateway_section=settings)
    try:
        run()
    finally:
        users.join()
    assert not users.failures
    refused = [one for one in users.answers if one.status_code != 200]
    assert refused and all((one.status_code, "retry-after" in one.headers) == (503, True) for one in refused)
    assert "killed by SIGKILL" in next(values["reason"] for kind, values in run.events if kind == "restarting")
    assert run.kinds.count("recovered") == 1 and len(started()) == 2
    assert set(steps) > set(steps_before)


class Team(Run):
    """Two jobs behind one gateway."""

    def __init__(self, script: str, folder: Path, **on: Any) -> None:
        super().__init__(script, folder, **on)
        servers = tuple(server_plan(folder / name, name) for name in ("planner", "solver"))
        routes = [{"name": "other", "swarm_url": "http://127.0.0.1:9"}, {"name": "solver"}, {"name": "planner"}]
        self.plan = replace(self.plan, servers=servers, gateway_section={"hooks": "x:y", "routes": routes})

    def named(self, kind: str) -> list[str]:
        return [values["name"] for found, values in self.events if found == kind]


def test_several_jobs_have_a_server_each_and_one_gateway_and_end_with_one_signal(tmp_path: Path) -> None:
    stepped: set[str] = set()

    def step(values: dict[str, Any]) -> None:
        stepped.add(values["job"])
        if stepped == {"planner", "solver"}:
            interrupt()(values)

    run = Team("steps", tmp_path, step=step)
    assert run()[-1] == "stopped"
    servers = ["swarm server of planner", "swarm server of solver"]
    assert run.named("listening") == [*servers, "gateway"]
    assert run.named("stopping") == ["gateway", "engine of planner", "engine of solver", *servers]
    urls = [values["url"] for kind, values in run.events if kind == "listening"]
    log = (tmp_path / "planner" / "logs" / "gateway.log").read_text()
    assert f"serving planner {urls[0]}" in log and f"serving solver {urls[1]}" in log
    assert "serving other http://127.0.0.1:9" in log
    for name in ("planner", "solver"):
        commands = (tmp_path / name / "commands").read_text().split()
        assert commands == ["/sync_train_config", "/start_engine", "/stop_engine"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("never-up@solver", "solver: the engine went offline: the engine process exited with code 1"),
        ("server-dies@solver", "the swarm server of solver ended with exit code 1"),
        ("server-dies@planner", "the swarm server of planner ended with exit code 1"),
    ],
)
def test_where_one_of_several_dies_the_others_end_and_it_is_named(tmp_path: Path, script: str, message: str) -> None:
    run = Team(script, tmp_path)
    with pytest.raises(UpFailedError, match=message):
        run()
    assert run.kinds[-1] == "stopped"


def test_the_jobs_end_together_when_all_have_done_their_last_step(tmp_path: Path) -> None:
    run = Team("done", tmp_path)
    short = [replace(one, job=one.job.model_copy(update={"total_training_steps": 2})) for one in run.plan.servers]
    run.plan = replace(run.plan, servers=tuple(short))
    assert run().count("finished") == 2


def test_a_server_may_take_longer_to_open_its_journal_than_others_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = START_DEADLINE

    def listening(values: dict[str, Any]) -> None:
        # the gateway starts now
        monkeypatch.setattr("gateway.launch.up.START_DEADLINE", others)

    monkeypatch.setattr("gateway.launch.up.START_DEADLINE", 0.0)
    assert Run("steps", tmp_path, listening=listening, step=interrupt())()[-1] == "stopped"


def test_a_gateway_that_cannot_start_ends_it_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(UpFailedError, match="the gateway ended with exit code 1") as caught:
        Run("gateway-dies", tmp_path)()
    assert caught.value.last_lines == ["swarm-gateway: port 8000 on 127.0.0.1 is in use"]


def test_a_gateway_that_was_killed_comes_back_at_its_address_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    urls: dict[str, str] = {}

    def listening(values: dict[str, Any]) -> None:
        urls[values["name"]] = values["url"]

    def kill_gateway(values: dict[str, Any]) -> None:
        # as many as there may be: without them nobody could ask
        with SwarmClient(urls["swarm server"], run.plan.private_token, run.plan.client_name) as swarm:
            for _ in range(16 // JOB.num_repeat):
                swarm.claim_group(JOB.num_repeat)
        [gateway] = children("serve")
        gateway.kill()

    def recovered(values: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{urls['gateway']}/v1/chat/completions", json=body, timeout=30, trust_env=False)
        answers.append((answer.status_code, answer.headers["x-swarm-trained"]))
        interrupt()(values)

    answers: list[tuple[int, str]] = []
    run = Run("paced", tmp_path / "run", listening=listening, ready=kill_gateway, gateway_recovered=recovered)
    settings = {"hooks": str(write_hooks(tmp_path / "hooks", REWARD)), "port": 0}
    [server] = run.plan.servers
    run.plan = replace(run.plan, servers=(replace(server, job=JOB),), gateway_section=settings)
    run()
    [(status, trained)] = answers
    assert status == 200 and trained in ("true", "pending"), "the places of the dead gateway are free again"
    [died] = [values for kind, values in run.events if kind == "gateway_restarting"]
    assert (died["reason"], died["attempt"]) == ("the gateway was killed by SIGKILL", 1)
    assert not {"engine_stopped", "restarting", "recovered"} & set(run.kinds), "the engine was not touched"
    logs = tmp_path / "run" / "logs"
    assert (logs / "gateway.log").exists() and (logs / "gateway.log.1").exists()


def test_an_incumbent_answers_before_the_engine_starts_and_is_started_again_when_it_dies(tmp_path: Path) -> None:
    def listening(values: dict[str, Any]) -> None:
        if values["name"] == "gateway":
            (tmp_path / "serves").touch()

    def recovered(values: dict[str, Any]) -> None:
        assert values["name"] == "incumbent base"
        if "incumbent_restarting" in run.kinds:
            interrupt()(values)
        else:
            # on a GPU each of two vLLMs that start at once would measure the memory that the other one takes
            assert "/start_engine" not in run.commands

    def ready(values: dict[str, Any]) -> None:
        assert "incumbent_recovered" in run.kinds
        [incumbent] = children("models")
        incumbent.kill()

    [port] = free_ports(1)
    run = Run("steps", tmp_path, listening=listening, incumbent_recovered=recovered, ready=ready)
    incumbent = IncumbentPlan("/models/base", "base", port, 560, 48, ("--swap-space=1",), ("default",))
    run.plan = replace(run.plan, incumbents=(incumbent,))
    run()
    [died] = [values for kind, values in run.events if kind == "incumbent_restarting"]
    assert (died["reason"], died["attempt"]) == ("the incumbent base was killed by SIGKILL", 1)
    assert "gateway_restarting" not in run.kinds and "restarting" not in run.kinds
    first, second = (json.loads(line) for line in (tmp_path / "models").read_text().splitlines())
    assert first == second
    told = {name: first[f"--{name}"] for name in ("name", "port", "max-model-len", "max-new-tokens", "swap-space")}
    wanted = {"name": "base", "port": port, "max-model-len": 560, "max-new-tokens": 48, "swap-space": 1}
    assert told == {name: str(value) for name, value in wanted.items()}
    assert (tmp_path / "logs" / f"incumbent-{port}.log").exists()


def test_a_second_one_in_the_folder_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    def again(values: dict[str, Any]) -> None:
        before = {path: path.read_bytes() for path in files()}
        second = Run("steps", tmp_path)
        with pytest.raises(ConfigError, match=rf"in use by another `up` or `train` \(pid {os.getpid()}\)"):
            second()
        assert second.kinds == [] and {path: path.read_bytes() for path in files()} == before
        interrupt()(values)

    def files() -> list[Path]:
        # the first one's server notes each command in a file
        return [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "commands"]

    Run("steps", tmp_path, ready=again)()


def test_while_one_waits_for_what_an_earlier_one_left_no_other_begins(tmp_path: Path) -> None:
    """It would take what the other has started for left, and kill it."""

    def again(values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="in use by another `up`"), held(tmp_path):
            pass
        assert left.stdin is not None
        left.stdin.close()

    environment = {**os.environ, UP_FOLDER: str(tmp_path)}
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as left:
        assert left.stdout is not None
        left.stdout.readline()
        kinds = Run("steps", tmp_path, waiting=again, step=interrupt())()
    assert kinds[0] == "waiting" and kinds[-1] == "stopped"


def test_a_second_signal_does_not_wait_for_the_engine(tmp_path: Path) -> None:
    def again(values: dict[str, Any]) -> None:
        if values["name"] == "engine":
            # once it waits for the engine, which here takes a minute
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    run = Run("slow-stop", tmp_path, ready=interrupt(), stopping=again)
    assert run()[-1] == "stopped"


def test_a_port_in_use_or_given_twice_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port: int = taken.getsockname()[1]
        run = Run("steps", tmp_path, ports=(0, port))
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            run()
    assert run.kinds == [] and list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=f"port {port} is given twice"):
        Run("steps", tmp_path, ports=(port, port))()


def test_a_run_folder_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run("steps", tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"run folder .*/file/run cannot be written .*; set swarm\.run_dir"):
        run()
    assert run.kinds == []


def test_only_the_servers_of_the_file_see_its_private_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TOKEN", "mine")
    urls = {"planner": "http://127.0.0.1:1", "solver": "http://127.0.0.1:2"}
    routes = [{"name": "other", "swarm_url": "http://127.0.0.1:9"}, {"name": "solver"}, {"name": "more"}]
    found = with_servers({"routes": routes}, urls, "private")
    assert (found["swarm_url"], found["swarm_token"]) == (urls["planner"], "private")
    other, solver, more = found["routes"]
    assert other["swarm_token"] == "mine"
    assert (solver["swarm_url"], solver["swarm_token"]) == (urls["solver"], "private")
    assert "swarm_token" not in more, "it has the first server's, and its token"
    said_above = with_servers({"swarm_token": "theirs", "routes": routes}, urls, "private")
    assert said_above["swarm_token"] == "private" and said_above["routes"][0]["swarm_token"] == "theirs"
    elsewhere = with_servers({"swarm_url": "http://127.0.0.1:9", "routes": [{"name": "planner"}]}, urls, "private")
    assert "swarm_token" not in elsewhere
    assert elsewhere["routes"] == [{"name": "planner", "swarm_url": urls["planner"], "swarm_token": "private"}]
