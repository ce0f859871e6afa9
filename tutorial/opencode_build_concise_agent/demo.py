"""The demo: pull a real model, train it through the app, run the control, and say in one sentence what happened.

    python demo.py --steps 16 --out demo-out
    python demo.py --steps 6 --no-control

Everything runs under a deadline, and whatever fails leaves no process behind and names the log to read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from gateway.replay import Report, print_report, read_report, write_report

HERE = Path(__file__).resolve().parent
CLI = [sys.executable, "-m", "gateway.cli"]
MODEL = "smollm2-135m"

# longer than the swarm server's own bound on a boot, which can say why it took so long
PULL_SECONDS, BOOT_SECONDS, STEP_SECONDS, STOP_SECONDS = 900, 700, 120, 150


class DemoError(Exception):
    """What failed, and where to read on."""


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_config(folder: Path, control: bool) -> tuple[Path, dict[str, Any]]:
    """``config.yaml`` beside us with ports, folders and the control of this run, written to ``folder``."""
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    swarm_port, gateway_port = free_ports(2)
    config["swarm"] |= {"port": swarm_port, "run_dir": str(folder / "run")}
    config["gateway"] |= {"port": gateway_port, "hooks": str(HERE), "control": "shuffle" if control else "none"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path, config


def call(command: list[str], seconds: float, what: str) -> None:
    """Run a command in our terminal.

    Raises:
        DemoError: it failed or took too long; by then it and all it started are gone.
    """
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{what} took longer than {seconds:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise DemoError(f"{what} failed with exit code {code}")


@contextlib.contextmanager
def running(config: Path, log: Path) -> Generator[subprocess.Popen[bytes]]:
    """``swarm-gateway up`` from when the engine is ready until the block ends; nothing of it is left then."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*CLI, "up", str(config), "--json"], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            wait_ready(process, log)
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


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Show what ``up`` does until its engine is ready.

    Raises:
        DemoError: it ended, or is not ready in time.
    """
    deadline = time.monotonic() + BOOT_SECONDS
    with log.open() as events:
        while time.monotonic() < deadline:
            line = events.readline()
            if not line.endswith("\n"):
                if process.poll() is not None:
                    raise DemoError(f"`up` ended with exit code {process.returncode}; read {log}")
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
                    raise DemoError(f"{event['message']}{tail}\n  full log: {event['log']}")
                case "ready":
                    print(f"  {event['at']:6.1f} s  ready", flush=True)
                    return
                case _:
                    pass
    raise DemoError(f"the engine is not ready after {BOOT_SECONDS} s; read {log}")


def train(label: str, out: Path, steps: int, control: bool) -> Report:
    """One run of ``up`` and the users of ``mock_user_request.py`` until ``steps`` training steps are done."""
    print(
        f"\n== {label}: {steps} steps, rewards {'shuffled within each group' if control else 'as they are'}", flush=True
    )
    config, values = run_config(out / label, control)
    users = [sys.executable, str(HERE / "mock_user_request.py"), "--until-step", str(steps), "--label", label]
    users += ["--base-url", f"http://127.0.0.1:{values['gateway']['port']}/v1"]
    users += ["--swarm-url", f"http://127.0.0.1:{values['swarm']['port']}"]
    users += ["--concurrency", str(values["job"]["batch_size"]), "--report", str(out / label)]
    limit = steps * STEP_SECONDS
    with running(config, out / label / "up.log"):
        call([*users, "--time-limit", str(limit)], limit + 120, f"asking the app (log: {out / label / 'up.log'})")
    report = read_report(out / label)
    if len(report.steps) < steps:
        raise DemoError(f"only {len(report.steps)} of {steps} steps: {report.stopped_because}; read {out / label}")
    return report


def sentence(run: Report, control: Report | None) -> str:
    """The result in one sentence."""
    text = f"Mean reward went {change(run)} with the real rewards"
    return f"{text}, and {change(control)} in the control." if control else f"{text}; no control was run."


def change(report: Report) -> str:
    """From the first three steps to the last three."""
    first, last = report.mean_of_first(), report.mean_of_last()
    if first is None or last is None:
        return "nowhere"
    return f"from {first:.3f} (first three steps) to {last:.3f} (last three, {last - first:+.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M through an unmodified app, with a control run.")
    parser.add_argument("--steps", type=int, default=16, help="training steps of each run")
    parser.add_argument("--no-control", action="store_true", help="skip the run with shuffled rewards")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for logs, reports and the plot")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    out = arguments.out.resolve()
    began = time.monotonic()
    # SIGTERM ends the with blocks like Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        call([*CLI, "models", "pull", MODEL], PULL_SECONDS, f"pulling {MODEL}")
        run = train("trained", out, arguments.steps, control=False)
        control = None if arguments.no_control else train("control", out, arguments.steps, control=True)
        write_report(run, out, [control] if control else [])
    except DemoError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print()
    print_report(run, Console(highlight=False), [control] if control else [])
    print(f"\nplot: {out / 'report.png'}   reports: {out}   {time.monotonic() - began:.0f} s in all\n")
    print(sentence(run, control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
