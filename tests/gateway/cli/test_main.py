"""The command line from outside: exit codes, one line on stderr, and what building it may import."""

import errno
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gateway
import swarm
from gateway.cli import main
from gateway.cli.root import app
from swarm.errors import EngineError, RequestError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of ``swarm-gateway ARGUMENTS`` in this process."""
    monkeypatch.setattr(sys, "argv", ["swarm-gateway", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_building_the_commands_imports_nothing_slow_and_only_the_monitor_draws() -> None:
    slow, drawing = {"rich", "pydantic", "aiohttp", "textual", "yaml"}, {"textual", "torch"}
    probe = (
        f"import sys, gateway.cli.root; print(sorted({slow} & set(sys.modules)))\n"
        # with which an error is said
        "import gateway.views.format; print('pydantic' in sys.modules)\n"
        f"import gateway.views.swarm_view; print(sorted({drawing} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", "False", "[]"]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_texts_of_a_model_go_to_a_pipe_of_any_encoding(tmp_path: Path, encoding: str) -> None:
    hook = "def on_compute_relative_reward(task, candidates, context):\n    return [len(c.text) for c in candidates]\n"
    (tmp_path / "on_compute_relative_reward.py").write_text(hook)
    (tmp_path / "groups.jsonl").write_text(json.dumps({"prompt": "?", "candidates": ["東", "東京 →"]}))
    command = [sys.executable, "-m", "gateway.cli", "hooks", "test", ".", "--data", "groups.jsonl"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"scoring ...\n")
    assert b"\\u6771\\u4eac \\u2192" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["monitor"], 2, "swarm-gateway: the monitor needs a terminal"),
        (["models", "list", "--json"], 0, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_closed_stdin_and_stdout_are_none(arguments: list[str], code: int, said: str) -> None:
    command = ["sh", "-c", 'exec "$0" -m gateway.cli "$@" <&- >&-', sys.executable, *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == code and done.stderr.decode().startswith(said) and b"Traceback" not in done.stderr


CHILD = """
import subprocess, sys

def app():
    print(subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="a signal of Unix")
def test_it_learns_how_its_processes_end_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    start = "import gateway.cli, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); gateway.cli.main('child:app')"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", start], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "3\n", done.stderr


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("up", "serve", "replay", "monitor", "swarm", "models"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "no-such-file.yaml"], "cannot read the config no-such-file.yaml"),
        (["serve", "--hooks", "no/such/folder"], "no/such/folder"),
        (["swarm", "start", "--host", "0.0.0.0"], "token"),
        (["swarm", "engine", "start", "no-such-job.yaml", "--swarm-url", "http://127.0.0.1:9"], "cannot read the job"),
        (["swarm", "status", "--swarm-url", "ftp://x"], "server_url"),
        (["models", "pull", "no-such-model"], "known: smollm2-135m"),
        (["replay", "--data", "x.jsonl", "--base-url", "nonsense"], "must look like http"),
        (["replay", "--data", "x.jsonl", "--time-limit", "0"], "time_limit: must be greater than 0"),
        (["replay", "--data", "x.jsonl", "--steps", "3"], "needs --swarm-url"),
        (["replay", "--data", "none.jsonl", "--model", "m"], "there is no file none.jsonl"),
        (["replay", "--data", "x.jsonl", "--compare", "none"], "cannot read the report none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("swarm-gateway: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job: {model: m, batchsize: 4}\ngateway: {hooks: h}", "batchsize"),
        ("tasks: {}\ngateway: {hooks: h}", "unknown section 'tasks'"),
        ("job: {model: /no/such/model}\ngateway: {hooks: h}", "/no/such/model"),
        ("gateway: {hooks: h}", "a section is missing"),
        ("1: {}\njob: {model: m}\ngateway: {hooks: h}", "unknown section 1;"),
        ("- a list", "must be a mapping"),
        ("job: [", "not valid YAML"),
    ],
)
def test_a_wrong_up_file_names_what_is_wrong(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "up.yaml").write_text(text)
    assert run("up", str(tmp_path / "up.yaml"), monkeypatch=monkeypatch) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/report.json"),
            2,
            "swarm-gateway: [Errno 28] No space left on device: '/x/report.json'\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (
            EngineError("the engine is offline:\nout of memory"),
            1,
            "swarm-gateway: the engine is offline: out of memory\n",
        ),
        (RequestError("no \x1b]0;owned\x07 such"), 2, "swarm-gateway: no \ufffd]0;owned\ufffd such\n"),
        (EngineError("verl refuses the job", code="wrong_config"), 2, "swarm-gateway: verl refuses the job\n"),
    ],
)
def test_errors_of_the_machine_and_interrupts_have_no_traceback(
    error: BaseException, code: int, err: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(app), "__call__", fail)
    assert run("models", "list", monkeypatch=monkeypatch) == code
    assert capsys.readouterr().err == err


def test_hooks_are_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "myrew.py").write_text("raise ImportError('it was found')")
    command = [sys.executable, "-P", "-c", "from gateway.cli import main; main()", "serve", "--hooks", "myrew:hooks"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "it was found" in done.stderr


def test_models_list_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path))
    assert run("models", "list", "--json", monkeypatch=monkeypatch) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["cached"], row["licence"]) == ("smollm2-135m", False, "Apache-2.0")


@pytest.mark.parametrize("installed", [True, False])
def test_the_version(installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def version(name: str) -> str:
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr("importlib.metadata.version", version)
    assert run("--version", monkeypatch=monkeypatch) == 0
    shown = "1.2.3" if installed else "0+unknown"
    assert capsys.readouterr().out == f"swarm-gateway {shown}\n"
    assert gateway.__version__ == swarm.__version__ == shown


@pytest.mark.parametrize("package", [gateway, swarm])
def test_a_package_has_no_other_attribute_of_that_kind(package: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute '__versoin__'"):
        _ = package.__versoin__
