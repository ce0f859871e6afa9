"""Stands in for the command line that ``up`` starts: a swarm server and a gateway that follow a script.

    python -m tests.gateway.scripted_up SCRIPT swarm start --config FILE --log-format text --stop-on-eof

The script is a word: ``steps`` (boot, roll, two steps, serve on), ``never-up`` (dies while it boots), ``dies-once``,
``dies-always`` and ``wrong-config`` (it dies once it rolls), ``stopped`` (the same on purpose), ``done`` (offline after
its two steps), ``model-gone`` (``dies-once``, and it cannot be started again), ``gateway-dies``, ``slow-stop``,
``server-dies`` (once its engine rolls), ``server-dies-first`` (when that is to start).
With ``@NAME`` behind it, it is for the server whose run folder has that name, and the others follow ``steps``. A model
is served once its folder has the file ``serves``, and answers with its own name, or refuses a prompt with TOO LONG;
with ``no-memory`` it ends instead. It is exported unless the run folder has ``no-export``. Every command that the
server gets is appended to ``RUN_DIR/commands``. ``paced``, ``recording`` and ``spelling`` are no stand-ins: they are
the command line itself, with the engines of the resilience and kill tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from gateway.cli.serve import stop_with_parent

STEPS = [{"step": n, "batch_id": f"b{n}", "metrics": {"swarm/reward_mean": n / 10}, "seconds": 1.0} for n in (1, 2)]


class Engine:
    """The state that ``/status`` tells; every look at it takes it one step on."""

    def __init__(self, script: str, commands: Path) -> None:
        self.script = script
        self.commands = commands
        self.looks: int | None = None
        self.starts = 0

    def command(self, name: str) -> dict[str, Any]:
        with self.commands.open("a") as file:
            file.write(name + "\n")
        if name == "/start_engine":
            if self.script == "server-dies-first":
                os._exit(1)
            if self.starts and self.script == "model-gone":
                return {"error": {"message": "there is no folder /models/tiny"}}
            self.looks = 0
            self.starts += 1
        if name == "/stop_engine":
            self.looks = None
            if self.script == "slow-stop":
                time.sleep(60)
        return {"success": True}

    def status(self) -> dict[str, Any]:
        if self.looks is None:
            return status("ENGINE.OFFLINE", "stopped")
        self.looks += 1
        if self.looks > 2 and self.script == "server-dies":
            os._exit(1)  # a thread of the server calls this
        if self.looks == 1:
            return status("ENGINE.BOOTING", "loading the model", boot_stage="model")
        if self.script == "never-up":
            return self.dead()
        if self.looks > 4 and self.script == "done":
            return status("ENGINE.OFFLINE", "all steps are done", steps=STEPS)
        if self.looks > 2 and self.script == "stopped":
            return status("ENGINE.OFFLINE", "stopped")
        if self.looks > 2 and (
            self.script in ("dies-always", "wrong-config")
            or (self.script in ("dies-once", "model-gone") and self.starts == 1)
        ):
            return self.dead()
        return status(
            "ENGINE.ROLLING",
            "",
            model="tiny",
            steps=STEPS[: self.looks - 2],
            engine_failure=failure(self.starts - 1) if self.starts > 1 else None,
        )

    def dead(self) -> dict[str, Any]:
        reason = "the engine process exited with code 1"
        died = failure(self.starts, wrong_config=self.script == "wrong-config")
        return status("ENGINE.OFFLINE", reason, last_lines=["CUDA [out] of memory"], engine_failure=died)


def failure(count: int, **fields: Any) -> dict[str, Any]:
    return {"reason": "the engine process exited with code 1", "count": count, **fields}


def status(state: str, detail: str, **fields: Any) -> dict[str, Any]:
    return {"engine": {"engine_status": state, "engine_status_detail": detail}, **fields}


def serve_swarm(script: str, config: dict[str, Any]) -> None:
    script, _, only = script.partition("@")
    if only and Path(config["run_dir"]).name != only:
        script = "steps"
    engine = Engine(script, Path(config["run_dir"]) / "commands")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(engine.status())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.answer(engine.command(self.path.partition("?")[0]))

        def answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(400 if "error" in body else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"swarm server listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


def serve_model(flags: dict[str, str]) -> None:
    folder = Path(flags["--folder"]).parent
    with (folder / "models").open("a") as file:
        file.write(json.dumps(flags) + "\n")
    if (folder / "no-memory").exists():
        sys.exit("Engine core initialization failed. See root cause above.")
    while not (folder / "serves").exists():
        time.sleep(0.02)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers.get("content-length", 0)))
            message = {"role": "assistant", "content": flags["--name"]}
            body: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
            if refused := b"TOO LONG" in asked:
                body = {"error": {"message": "the prompt is too long"}}
            data = json.dumps(body).encode()
            self.send_response(400 if refused else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()


def main() -> None:
    script, *arguments = sys.argv[1:]
    if script in ("paced", "recording", "spelling"):
        import swarm.server.engine.supervisor
        import swarm.server.journal.writer
        from gateway.cli import main as command_line
        from tests.standins.engine import command

        if script == "spelling":
            # it tidies its journal as soon as it may
            swarm.server.journal.writer.AGE_SECONDS = 0.5
            swarm.server.journal.writer.ANEW_SHARE = 0.1
        swarm.server.engine.supervisor.ENGINE_COMMAND = command(script)
        sys.argv[1:] = arguments
        command_line()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if arguments[:2] == ["models", "export"]:
        out = Path(arguments[arguments.index("--out") + 1])
        with (out.parents[1] / "exports").open("a") as file:
            file.write(f"{out.name}\n")
        if (out.parents[1] / "no-export").exists():
            sys.exit("swarm-gateway: step 2 is not kept")
        out.mkdir()
        return
    if arguments[0] == "models":
        stop_with_parent()
        serve_model(dict(flag.split("=", 1) for flag in arguments if "=" in flag))
        return
    config = yaml.safe_load(Path(arguments[arguments.index("--config") + 1]).read_text())
    if script == "steps":
        print("arguments", *arguments, file=sys.stderr, flush=True)
    if arguments[0] == "swarm":
        serve_swarm(script, config)
        return
    if script == "gateway-dies":
        sys.exit("swarm-gateway: port 8000 on 127.0.0.1 is in use")
    for served in (config, *config.get("routes", [])):
        print(f"serving {served.get('name', 'all')} {served['swarm_url']}", flush=True)
    # last: from then on it may be ended, and its log be read
    print("gateway listening on http://127.0.0.1:9", flush=True)
    signal.pause()


main()
