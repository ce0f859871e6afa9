"""Runs of ``swarm-gateway up`` for a study: start, wait until ready, send the users' requests, stop.

Invariant: everything runs under a deadline, and a failure leaves no process behind and names the log to read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from gateway.reports.report import Report, read_report
from gateway.stats import GatewayStatus
from swarm.http.serve import free_ports
from swarm.importer import python_path

CLI = [sys.executable, "-P", "-m", "gateway.cli"]

# longer than the swarm server's own bound on a boot, which can say why it took so long
PULL_SECONDS, BOOT_SECONDS, STEP_SECONDS, STOP_SECONDS = 900, 700, 400, 150


class ExperimentError(Exception):
    """What failed, and where to read on."""


def pull(model: str) -> None:
    """Get a model into the cache.

    Raises:
        ExperimentError: it cannot be had.
    """
    call([*CLI, "models", "pull", model], PULL_SECONDS, f"pulling {model}")


def run_config(base: Path, folder: Path, *, control: bool, **gateway: Any) -> tuple[Path, dict[str, Any]]:
    """The configuration ``base`` with ports, folders and the control of this run, written to ``folder``.

    Args:
        gateway: settings of the gateway that are others than in ``base``.

    Returns:
        The new file and its contents.
    """
    config = yaml.safe_load(base.read_text())
    swarm_port, gateway_port = islice(free_ports(), 2)
    config["swarm"] |= {"port": swarm_port, "run_dir": str(folder / "run")}
    hooks = str((base.parent / config["gateway"]["hooks"]).resolve())
    config["gateway"] |= {"port": gateway_port, "hooks": hooks, "control": "shuffle" if control else "none"}
    config["gateway"] |= gateway
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path, config


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path()}


def call(command: list[str], seconds: float, what: str) -> None:
    """Run a command in our terminal.

    Raises:
        ExperimentError: it failed or took too long; by then it and all it started are gone.
    """
    with subprocess.Popen(command, start_new_session=True, env=_environment()) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ExperimentError(f"{what} took longer than {seconds:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise ExperimentError(f"{what} failed with exit code {code}")


@contextlib.contextmanager
def running(config: Path, log: Path) -> Generator[subprocess.Popen[bytes]]:
    """``swarm-gateway up`` from when the engine is ready until the block ends; nothing of it is left then.

    Raises:
        ExperimentError: it ended, or was not ready in time.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*CLI, "up", str(config), "--fresh", "--json"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        ) as process,
    ):
        try:
            _wait_ready(process, log)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # a second signal makes it kill what does not stop
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Show what ``up`` does until its engine is ready."""
    deadline = time.monotonic() + BOOT_SECONDS
    with log.open() as events:
        while time.monotonic() < deadline:
            line = events.readline()
            if not line.endswith("\n"):
                if process.poll() is not None:
                    raise ExperimentError(f"`up` ended with exit code {process.returncode}; read {log}")
                time.sleep(0.2)
                continue
            try:
                event = json.loads(line)
            except ValueError:
                print(f"  {line.rstrip()}")
                continue
            match event["event"]:
                case "listening":
                    print(f"  {event['at']:6.1f} s  {event['name']}: {event['url']}   (log: {event['log']})")
                case "boot":
                    print(f"  {event['at']:6.1f} s  engine: {event['detail'] or event['stage']}")
                case "failed":
                    tail = "".join(f"\n    | {one}" for one in event["last_lines"])
                    raise ExperimentError(f"{event['message']}{tail}\n  full log: {event['log']}")
                case "ready":
                    print(f"  {event['at']:6.1f} s  ready", flush=True)
                    return
                case _:
                    pass
    raise ExperimentError(f"the engine is not ready after {BOOT_SECONDS} s; read {log}")


def ask_until(command: list[str], config: dict[str, Any], steps: int, folder: Path) -> Report:
    """Let users ask until ``steps`` training steps are done.

    Args:
        command: a replay that takes the options of ``swarm-gateway replay``; it gets those of the addresses, the steps,
            the time limit and the report.
        config: of the running gateway and swarm server, from :func:`run_config`.
        folder: gets the report, and has the log.

    Raises:
        ExperimentError: it failed, or ended before the last step.
    """
    limit = steps * STEP_SECONDS
    users = [*command, "--steps", str(steps), "--label", folder.name]
    users += ["--base-url", f"http://127.0.0.1:{config['gateway']['port']}/v1", "--swarm-url", swarm_url(config)]
    users += ["--concurrency", str(config["job"]["batch_size"]), "--time-limit", str(limit), "--report", str(folder)]
    call(users, limit + 120, f"asking the app (log: {folder / 'up.log'})")
    report = read_report(folder)
    assert isinstance(report, Report), "a replay was asked for"
    if len(report.steps) < steps:
        raise ExperimentError(f"only {len(report.steps)} of {steps} steps: {report.stopped_because}; read {folder}")
    return report.model_copy(update={"control": config["gateway"]["control"]})


def answers_of(config: dict[str, Any]) -> Counter[str]:
    """How the answers of the running gateway were chosen, from its own counts (see ``gateway.stats.Choice``)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{config['gateway']['port']}/status", timeout=30) as status:
        return GatewayStatus.model_validate_json(status.read()).answers


def swarm_url(config: dict[str, Any]) -> str:
    """The address of a run's swarm server."""
    return f"http://127.0.0.1:{config['swarm']['port']}"
