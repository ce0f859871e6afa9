"""Every mistake that a new user made, and the words that must be in the message: the cause, the place, and the cure.

What takes the engine's own code, which is not installed everywhere, or whole processes, is slow.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from gateway.cli import main
from gateway.launch.run_folder import held
from swarm.job import TrainJob, dump_job
from swarm.server.engine.resolving import Resolver
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import RunRow, StepRow
from swarm.types import StepResult

UP = """\
job:
  model: tiny
  batch_size: 4
swarm:
  port: 0
gateway:
  port: 0
  hooks: hooks
"""
HOOK = "hooks/on_compute_relative_reward.py"
REWARD = """\
def on_compute_relative_reward(task, candidates, context):
    return [float(len(one.text)) for one in candidates]
"""
PROMPTS = '{"prompt": "What is a prime?"}\n'


class Mistake(NamedTuple):
    """A change of one file of the project, a command, and words of its message."""

    what: str
    file: str
    change: tuple[str, str] | str
    command: str
    words: tuple[str, ...]


def in_up(what: str, old: str, new: str, *words: str) -> Mistake:
    return Mistake(what, "my.yaml", (old, new), "up my.yaml", words)


def in_hook(what: str, text: str, *words: str) -> Mistake:
    return Mistake(what, HOOK, text, "up my.yaml", words)


def elsewhere(what: str, command: str, *words: str) -> Mistake:
    return Mistake(what, "my.yaml", UP, command, words)


BATCH = "batch_size: 4"
FILE = [
    in_up("no such model folder", "model: tiny", "model: /nope/model", "there is no model folder /nope/model", "give"),
    in_up("a misspelt model", "model: tiny", "model: smollm2-135", "did you mean 'smollm2-135m'?"),
    in_up("a misspelt key", BATCH, "batchsize: 4", "my.yaml, job: unknown key 'batchsize'", "'batch_size'?"),
    in_up("hook for hooks", "hooks: hooks", "hook: hooks", "my.yaml, gateway: unknown key 'hook'", "mean 'hooks'?"),
    in_up("a misspelt section", "gateway:", "gatway:", "unknown section 'gatway' (did you mean 'gateway'?)"),
    in_up(
        "a word for a number", BATCH, "batch_size: four", "my.yaml, job: batch_size: must be a whole number", "'four'"
    ),
    in_up("a zero", BATCH, "batch_size: 0", "my.yaml, job: batch_size: must be at least 1, not 0"),
    in_up("one answer", BATCH, "num_repeat: 1", "my.yaml, job: num_repeat: must be at least 2, not 1"),
    in_up("below the range", BATCH, "save_freq: -3", "my.yaml, job: save_freq: must be at least -1, not -3"),
    in_up("no port", "port: 0\n  hooks", "port: 84000\n  hooks", "my.yaml, gateway: port: must be at most 65535"),
    in_up("no token", "swarm:", "swarm:\n  host: 0.0.0.0", "on 0.0.0.0 without a token", "set SWARM_TOKEN, or"),
    in_up("a tab", "  batch_size", "\tbatch_size", "my.yaml is not valid YAML", "line 3"),
    in_up("no hooks", "  hooks: hooks", "", "gateway: hooks is required with a swarm server"),
    in_up(
        "sizes that do not fit", BATCH, "n_gpu: 2\n  tensor_parallel_size: 4", "job: n_gpu * nnodes must be divisible"
    ),
    Mistake("an empty file", "my.yaml", "", "up my.yaml", ("a section is missing", "job (model, ...)")),
    Mistake("a text", "my.yaml", "train it, please", "up my.yaml", ("my.yaml must be a mapping, got str",)),
    elsewhere("no file", "up none.yaml", "cannot read the config none.yaml: No such file or directory"),
    Mistake("a job for up", "my.yaml", "model: tiny\n", "up my.yaml", ("a file for `up` has job (model, ...)",)),
    elsewhere("a file for up, for train", "train my.yaml", "my.yaml is a file for `up`: swarm-gateway up my.yaml"),
    Mistake(
        "a file for train, for up",
        "my.yaml",
        "job: {model: tiny}\nworkflow: a:b\ntasks: {train: x.jsonl}\n",
        "up my.yaml",
        ("my.yaml is a file for `train`: swarm-gateway train my.yaml",),
    ),
    Mistake(
        "a file for train, for a gateway",
        "my.yaml",
        "job: {model: tiny}\nworkflow: a:b\ntasks: {train: x.jsonl}\n",
        "serve --config my.yaml",
        ("my.yaml is a file for `train` and has no section gateway",),
    ),
    Mistake(
        "one of several jobs is wanted",
        "my.yaml",
        "jobs: {one: {job: {model: tiny}}, 2: {job: {model: tiny}}}\ngateway: {hooks: hooks}\n",
        "config show my.yaml",
        ("my.yaml has the jobs one, 2, and one is wanted here",),
    ),
    Mistake(
        "a section that is a list, for a job",
        "my.yaml",
        "job: {model: tiny}\nswarm: [1]\ngateway: {hooks: hooks}\n",
        "config show my.yaml",
        ("my.yaml: swarm must be a mapping, got list",),
    ),
    elsewhere(
        "no file of keys", "keys create shop -c my.yaml", "my.yaml has no keys_file: add one to its gateway's settings"
    ),
    elsewhere("keys of nowhere", "keys create shop", "by --file or by --config", "or run this where `up` runs"),
    in_up("resume and fresh", "", "", "")._replace(command="up my.yaml --resume --fresh", words=("give one of them",)),
]
HOOKS = [
    in_hook("syntax", "def on_compute(:\n", "on_compute_relative_reward.py", "line 1"),
    in_hook(
        "parameters", "def on_compute_relative_reward(a):\n    return []\n", "on_compute_relative_reward", "context"
    ),
    in_hook("another name", "def reward(task, candidates, context):\n    return []\n", "on_compute_relative_reward"),
    in_hook("a missing module", "import nonesuch\n", "on_compute_relative_reward.py", "nonesuch"),
    in_up("no such folder of hooks", "hooks: hooks", "hooks: ./none", "none"),
    in_up(
        "a misspelt built-in hook",
        "hooks: hooks",
        "hooks: exact_macth",
        "no hook folder or hook named 'exact_macth'",
        "exact,",
    ),
]
REPLAY = "replay --data prompts.jsonl --model m --base-url http://127.0.0.1:9/v1"
DATA = [
    Mistake(
        "no prompt",
        "prompts.jsonl",
        '{"ticket": "x"}\n',
        REPLAY,
        ("prompts.jsonl, line 1: there is no prompt", "columns", "question"),
    ),
    Mistake("a broken line", "prompts.jsonl", PROMPTS + "{", REPLAY, ("prompts.jsonl", "line 2")),
    Mistake("a table", "prompts.csv", "a,b\n", REPLAY.replace("jsonl", "csv"), ("prompts.csv", ".jsonl", ".parquet")),
    Mistake("no prompts at all", "prompts.jsonl", "", REPLAY, ("prompts.jsonl holds no",)),
    elsewhere("no such prompts", "replay --data none.jsonl --model m", "there is no file none.jsonl"),
    elsewhere("no gateway", "replay --data prompts.jsonl --base-url http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1"),
    Mistake(
        "a column that is not there",
        "prompts.jsonl",
        PROMPTS,
        "replay --data prompts.jsonl --command 'echo {tickt}'",
        ("--command needs {question} where the prompt goes",),
    ),
]
SERVERS = [
    elsewhere("nothing runs here", "swarm status --swarm-url http://127.0.0.1:9", "no swarm server answers", ":9"),
    elsewhere("no such run", "monitor my.yaml --json", "no `up` or `train` of my.yaml runs; start it"),
    elsewhere("no study", "research run .", "study.yaml"),
    elsewhere("no such day", "config show my.yaml --set experiment=2026-13-01", "--set 'experiment=2026-13-01': month"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, in which everything is right, as the working directory."""
    for name, text in {"tiny/config.json": "{}", HOOK: REWARD, "prompts.jsonl": PROMPTS, "my.yaml": UP}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("SWARM_TOKEN", "SWARM_GATEWAY_KEY", "RAY_ADDRESS", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """The message of a command that is refused."""

    def refused(command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["swarm-gateway", *shlex.split(command)])
        with pytest.raises(SystemExit) as caught:
            main()
        message = capsys.readouterr().err
        assert caught.value.code == 2, message
        return message

    return refused


@pytest.mark.parametrize("mistake", [*FILE, *HOOKS, *DATA, *SERVERS], ids=lambda one: one.what.replace(" ", "-"))
def test_a_mistake_is_told_with_its_cause(mistake: Mistake, project: Path, told: Callable[[str], str]) -> None:
    file = project / mistake.file
    if isinstance(mistake.change, str):
        file.write_text(mistake.change)
    else:
        old, new = mistake.change
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1) if old else text)
    message = told(mistake.command)
    assert all(word in message for word in mistake.words), message
    assert len(message.strip().splitlines()) == 1 and message.startswith("swarm-gateway: ")
    assert not any(words in message for words in ("Value error", "Input should", "Field required", "Traceback"))
    assert not (project / "runs").exists(), "nothing was started"


def test_scripts_read_what_is_wrong_with_a_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "my.yaml").write_text(UP.replace("model: tiny", "model: none"))
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", "up", "my.yaml", "--check", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    said = json.loads(capsys.readouterr().out)
    assert caught.value.code == 2
    assert said["ok"] is False and "there is no model folder" in said["error"]


MACHINE = [
    (
        "more than the model takes",
        "max_response_length: 200000",
        ("203,000 tokens", "the model takes 8,192", "set both"),
    ),
    ("no GPU", "device: cuda", ("device is cuda", "no GPU", "leave device out")),
    ("GPUs on a CPU", "device: cpu\n  n_gpu: 4", ("n_gpu is 4", "on the CPU", "leave it out")),
    ("several nodes", "nnodes: 2", ("needs a running Ray cluster", "`ray start`", "RAY_ADDRESS")),
    ("a key of verl", "overrides: {actor_rollout_ref.actor.clip_ration: 1}", ("actor_rollout_ref.actor.clip_ratio ",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["up my.yaml", "up my.yaml --check"])
@pytest.mark.parametrize(("what", "line", "words"), MACHINE, ids=[one[0].replace(" ", "-") for one in MACHINE])
def test_what_the_engine_would_refuse_is_told_before_anything_starts(
    what: str, line: str, words: tuple[str, ...], command: str, project: Path, told: Callable[[str], str]
) -> None:
    pytest.importorskip("verl", reason="needs the cpu or gpu extra")
    if what == "no GPU" and Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    (project / "tiny/config.json").write_text('{"max_position_embeddings": 8192}')
    (project / "my.yaml").write_text(UP.replace(BATCH, line))
    message = told(command)
    assert all(word in message for word in words), message
    assert not (project / "runs").exists()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own code does not check the job."""

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr("swarm.server.engine.changes.check_job", nothing)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("command", ["up my.yaml", "up my.yaml --check"])
def test_a_port_in_use_is_told(command: str, project: Path, told: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (project / "my.yaml").write_text(UP.replace("port: 0\n  hooks", f"port: {port}\n  hooks"))
        assert f"port {port} on 127.0.0.1 is in use: stop what runs there or choose another" in told(command)
    assert not (project / "runs").exists()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("command", ["up my.yaml", "up my.yaml --check", "up my.yaml --check --fresh"])
def test_a_run_folder_in_use_is_told_and_not_touched(command: str, project: Path, told: Callable[[str], str]) -> None:
    log = project / "runs/default/logs/swarm.log"
    with held(project / "runs/default"):
        log.parent.mkdir()
        log.write_text("of the first one")
        message = told(command)
    assert "in use by another `up` or `train` (pid " in message and "or set swarm.run_dir" in message
    assert log.read_text() == "of the first one"


@pytest.mark.usefixtures("unchecked")
def test_what_a_hook_prints_as_it_loads_is_no_event(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / HOOK).write_text(f"print('loading')\n{REWARD}")
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", "up", "my.yaml", "--json"])
    with held(project / "runs/default"), pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert "loading" not in printed.out and "loading" in printed.err


@pytest.mark.usefixtures("unchecked")
def test_a_folder_that_holds_the_file_is_not_renamed(project: Path, told: Callable[[str], str]) -> None:
    (project / "my.yaml").write_text(UP.replace("swarm:", "swarm:\n  run_dir: ."))
    message = told("up my.yaml --check --fresh")
    assert f"--fresh would rename {project}, which holds my.yaml: set swarm.run_dir to a folder of its own" in message


@pytest.fixture
def earlier(project: Path) -> None:
    """A run in the folder that has done seven steps and saved six."""

    async def fill() -> None:
        journal = Journal.open(project / "runs/default/journal.db")
        job = dump_job(TrainJob(model=str(project / "tiny"), served_model_name="tiny", batch_size=4), only_set=True)
        step = StepResult(step=7, batch_id="b", metrics={}, seconds=1.0)
        journal.append(RunRow("r", job), StepRow("r", step))
        await journal.close()

    checkpoints = project / "runs/default/checkpoints"
    (checkpoints / "global_step_6").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    asyncio.run(fill())


@pytest.mark.usefixtures("unchecked", "earlier")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "batch_size: 8",
            ("a run that has done 7 steps; the job differs in batch_size", "--resume goes on", "of step 6", "--fresh"),
        ),
        (
            f"{BATCH}\n  total_training_steps: 3",
            ("its last checkpoint is of step 6, and total_training_steps is 3: raise it and add --resume",),
        ),
    ],
)
@pytest.mark.parametrize("command", ["up my.yaml", "up my.yaml --check"])
def test_a_run_that_the_job_does_not_go_on_with_is_told_before_anything_starts(
    line: str, words: tuple[str, ...], command: str, project: Path, told: Callable[[str], str]
) -> None:
    (project / "my.yaml").write_text(UP.replace(BATCH, line))
    message = told(command)
    assert all(word in message for word in words), message
    assert not (project / "runs/default/logs").exists()


@pytest.mark.usefixtures("unchecked", "earlier")
def test_fewer_steps_than_were_done_are_told(project: Path, told: Callable[[str], str]) -> None:
    (project / "my.yaml").write_text(UP.replace(BATCH, f"{BATCH}\n  total_training_steps: 3"))
    message = told("up my.yaml --check --resume")
    assert "its last checkpoint is of step 6, and total_training_steps is 3: raise it" in message


def test_a_light_install_says_what_it_lacks(
    project: Path, told: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hides = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
hidden = ("hydra", "torch", "ray", "verl", "vllm")
importlib.util.find_spec = lambda name, *of: None if name in hidden else find(name, *of)
runpy.run_module("adapters.verl", run_name="__main__", alter_sys=True)
"""
    light = [sys.executable, "-c", hides]
    monkeypatch.setattr("swarm.server.engine.changes.Resolver", lambda run_dir: Resolver(run_dir, light))
    message = told("up my.yaml --check")
    assert "this install cannot train, for hydra, torch, ray, verl, vllm are not installed" in message
    assert "in a clone, on a CPU `make setup`, with GPUs `pip install -c requirements/gpu.lock '.[gpu]'`" in message


@pytest.mark.usefixtures("unchecked")
def test_a_disk_without_room_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tiny/model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=100, free=10))
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", "up", "my.yaml", "--check"])
    with pytest.raises(SystemExit) as caught:
        main()
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "WARNING: there is no room for a checkpoint" in out and "my.yaml: right" in out


GATE = """
  serve:
    incumbent: {upstream: {base_url: "http://127.0.0.1:9/v1", model: big}}
    gate: {mode: MODE, trial_every: 20}
"""


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("mode", "saved", "words"),
    [
        ("auto", "save_freq: 15", "gate.trial_every is 20 and job.save_freq is 15, so a version"),
        ("manual", "save_freq: -1", "gate.trial_every is 20 and job.save_freq is -1, so a version"),
        ("auto", "save_freq: 5\n  overrides: {trainer.save_freq: 7}", "job.overrides has trainer.save_freq 7"),
        ("auto", "save_freq: 10", ""),
        ("never", "save_freq: 15", ""),
    ],
)
def test_what_is_promoted_between_two_checkpoints_is_a_warning(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    saved: str,
    words: str,
) -> None:
    (project / "my.yaml").write_text(UP.replace(BATCH, f"{BATCH}\n  {saved}") + GATE.replace("MODE", mode))
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", "up", "my.yaml", "--check"])
    with pytest.raises(SystemExit) as caught:
        main()
    out = capsys.readouterr().out
    assert caught.value.code == 0, out
    warnings = [line for line in out.splitlines() if "WARNING: route default: " in line]
    assert bool(warnings) == bool(words)
    # an override wins over the field
    setting = "that" if "overrides" in saved else "job.save_freq"
    told = f"set {setting} to 20, or to a number that divides 20"
    assert all(words in warning and told in warning for warning in warnings)


def test_a_model_that_is_not_downloaded_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
    with_incumbent = UP.replace("gateway:", "gateway:\n  serve: {incumbent: {model: org/model}}")
    (project / "my.yaml").write_text(with_incumbent)
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", "up", "my.yaml", "--check"])
    with pytest.raises(SystemExit):
        main()
    [warning] = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert "org/model is not on this machine" in warning and "`hf download org/model`" in warning


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["billing", "default"])
def test_less_that_is_kept_of_no_route_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    less = f"keep_routes: {{{name}: {{keep_seconds: 3600}}}}"
    text = UP.replace("swarm:\n", f"swarm:\n  {less}\n") + f"  request_log: {{path: log, {less}}}\n"
    (project / "my.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", "up", "my.yaml", "--check"])
    with pytest.raises(SystemExit) as caught:
        main()
    out = capsys.readouterr().out
    assert caught.value.code == 0, out
    warnings = [line.partition("WARNING: ")[2] for line in out.splitlines() if "keep_routes" in line]
    of = ["swarm", "gateway.request_log"] if name == "billing" else []
    assert warnings == [f"{where}.keep_routes: there is no route 'billing'; there is 'default'" for where in of]
