"""What becomes of a model that is served as it is: the command line of vLLM, and its end with its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from gateway.cli.root import app

PYTHON = sys.executable


class ExecutedError(Exception):
    pass


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter's folder with a ``vllm`` in it, and a machine without a GPU."""
    monkeypatch.setattr("adapters.verl.serving.resolve_device", lambda job: "cpu")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho vllm $1 $2\nexec sleep 600\n")
    program.chmod(0o755)
    return program


def test_the_command_line_of_vllm(tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(program: Path, arguments: list[str], environment: dict[str, str]) -> None:
        executed.append((arguments, environment))
        raise ExecutedError

    executed: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", execute)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setattr(tempfile, "tempdir", f"/{'scratch' * 10}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    flags = ["--port", "9001", "--max-model-len", "560", "--max-new-tokens", "48", "--folder", str(tmp_path / "own")]
    result = CliRunner().invoke(app, ["models", "serve", str(tmp_path / "mine"), *flags, "--swap-space", "1"])
    assert isinstance(result.exception, ExecutedError), result.output
    # vLLM takes its options with underscores, too
    for option in ("--tensor-parallel-size=2", "--tensor_parallel_size=2"):
        CliRunner().invoke(app, ["models", "serve", str(tmp_path / "mine"), *flags, option])
    [(arguments, environment), *parallel] = executed
    assert arguments[:3] == [str(vllm), "serve", str(tmp_path / "mine")]
    options = dict(zip(arguments[3::2], arguments[4::2], strict=False))
    assert options["--served-model-name"] == str(tmp_path / "mine")
    assert options["--allowed-origins"] == "[]"
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "9001")
    assert (options["--max-model-len"], options["--override-generation-config"]) == ("560", '{"max_new_tokens": 48}')
    assert options["--dtype"] == "float32" and arguments[-2:] == ["--swap-space", "1"]
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_RPC_BASE_PATH"] == "/tmp", "a socket's path may have 107 characters"
    assert "PYTHONOPTIMIZE" not in environment, "without docstrings transformers cannot be imported"
    assert environment["OMP_NUM_THREADS"] == "3", "what the operator has set wins"
    assert environment["VLLM_NO_USAGE_STATS"] == "1", "nothing is sent to others, see docs/privacy.md"
    assert arguments[arguments.index("--distributed-executor-backend") + 1].endswith(".UniProcExecutor")
    assert len(parallel) == 2 and not any("--distributed-executor-backend" in command for command, _ in parallel)


def test_without_vllm_it_says_how_to_install_it(vllm: Path) -> None:
    vllm.unlink()
    result = CliRunner().invoke(app, ["models", "serve", "some/model"])
    assert result.exit_code != 0 and "vLLM is not installed here" in f"{result.output}{result.exception}"


def test_a_port_that_is_none_is_refused(vllm: Path) -> None:
    result = CliRunner().invoke(app, ["models", "serve", "some/model", "--port", "99999"])
    assert result.exit_code == 2 and "'--port'" in result.output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_it_ends_with_its_parent(tmp_path: Path, vllm: Path) -> None:
    serve = (
        "import os, sys\n"
        "from adapters.verl import serving\n"
        f"serving.resolve_device = lambda job: 'cpu'\nsys.executable = {str(vllm.with_name('python'))!r}\n"
        f"serving.serve_model('m', 'm', ('127.0.0.1', 1), serving.Path({str(tmp_path)!r}), ends_with_parent=True)\n"
    )
    start = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.argv[1], '-c', sys.argv[2]]).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [PYTHON, "-c", start, PYTHON, serve]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "vllm serve m\n"
        parent.kill()
        child.wait(10)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_it_ends_with_a_parent_that_is_gone_before_vllm_begins(tmp_path: Path, vllm: Path) -> None:
    serve = (
        "import sys\n"
        "from adapters.verl import serving\n"
        f"serving.resolve_device = lambda job: 'cpu'\nsys.executable = {str(vllm.with_name('python'))!r}\n"
        "from gateway.cli import main\n"
        "main()\n"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--folder", str(tmp_path / "own"), "--stop-on-eof"]
    # what the parent held open is at its end
    command = [PYTHON, "-c", serve, "models", "serve", str(tmp_path / "mine"), *flags]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
