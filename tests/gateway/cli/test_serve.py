"""``serve --check``, and what every server process has: its log, and an end with its parent."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import uvicorn
from typer.testing import CliRunner, Result
from uvicorn.config import LOGGING_CONFIG

from gateway.cli.root import app
from gateway.cli.serve import log_to_stderr
from swarm.errors import ConfigError
from tests.gateway.conftest import REWARD, write_hooks
from tests.swarm.http.certificates import make_certificate

GOOD = """
hooks: hooks
keys_file: keys.json
tls: {certificate: server.pem, key: server.key}
default_route: plain
routes:
  - {name: writer, swarm_url: "http://127.0.0.1:10086"}
  - {name: plain, swarm_url: null, upstream: {base_url: "http://127.0.0.1:9/v1"}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_hooks(tmp_path / "hooks")
    make_certificate(tmp_path)
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD)
    return path


def run(config: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--check", "-c", str(config), *flags])


def test_a_configuration_that_is_right(config: Path) -> None:
    assert run(config).stdout == f"{config}: right, routes writer, plain\n"
    assert json.loads(run(config, "--json").stdout) == {"ok": True, "routes": ["writer", "plain"]}


def test_what_a_hook_prints_as_it_loads_is_not_in_the_answer(config: Path) -> None:
    write_hooks(config.parent / "hooks", f"print('loading')\n{REWARD}")
    assert json.loads(run(config, "--json").stdout)["ok"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("default_route: plain", "default_route: plian", "no route named 'plian'"),
        ("keys_file:", "keysfile:", "did you mean 'keys_file'"),
        ("hooks: hooks", "hooks: nowhere", "nowhere"),
        ("key: server.key", "key: other.key", r"tls\.key: cannot read"),
        ("keys.json", "gateway.yaml", "gateway.yaml"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(config: Path, old: str, new: str, message: str) -> None:
    config.write_text(GOOD.replace(old, new))
    config.chmod(0o600)
    result = run(config)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception
    as_json = run(config, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout) == {"ok": False, "error": result.exception.message}


@contextmanager
def logged(form: Literal["text", "json"]) -> Generator[list[str]]:
    """Loggers as in a server; the lines that are logged in the block."""
    names = ("gateway", "swarm", "reward_hooks", "adapters", "uvicorn", "uvicorn.error", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as stderr:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(logging.root, "handlers", [])
        patch.setitem(LOGGING_CONFIG["formatters"], "default", {})
        log_to_stderr(form)
        # a server of uvicorn installs handlers of its own
        uvicorn.Config(None, log_level="warning")  # type: ignore[arg-type]
        yield lines
        lines += stderr.getvalue().splitlines()
    for logger, (level, logger.handlers, logger.propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_servers_log_with_time_level_and_name() -> None:
    with logged("text") as lines:
        for name in ("swarm.server.engine.controller", "uvicorn.error", "aiohttp"):
            logging.getLogger(name).info("news")
            logging.getLogger(name).warning("trouble")
    # the first two words are the date and the time
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "INFO swarm.server.engine.controller: news",
        "WARNING swarm.server.engine.controller: trouble",
        "WARNING uvicorn.error: trouble",
        "WARNING aiohttp: trouble",
    ]
    assert all(line[:2] == "20" for line in lines)


def test_servers_log_objects_without_what_users_say() -> None:
    with logged("json") as lines:
        for name in ("gateway.x", "uvicorn.error"):
            logging.getLogger(name).warning("trouble: %s", ValueError("what a user said"))
    assert [(one["level"], one["logger"], one["message"]) for one in map(json.loads, lines)] == [
        ("warning", "gateway.x", "trouble: ValueError"),
        ("warning", "uvicorn.error", "trouble: ValueError"),
    ]


def test_a_server_ends_when_its_parents_end_of_the_pipe_closes() -> None:
    code = "import signal\nfrom gateway.cli.serve import stop_with_parent\nstop_with_parent()\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == -signal.SIGTERM


def test_hooks_of_the_command_line_start_from_here_and_not_from_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each says by its error which one was read
    for folder in (config.parent, config.parent / "here"):
        folder.mkdir(exist_ok=True)
        (folder / "blend.yaml").write_text(f"{{parts: [{{hook: of_{folder.name}}}]}}")
    monkeypatch.chdir(config.parent / "here")
    with pytest.raises(ConfigError, match="'of_here'"):
        CliRunner().invoke(
            app, ["serve", "--check", "--config", str(config), "--hooks", "blend.yaml"], catch_exceptions=False
        )
