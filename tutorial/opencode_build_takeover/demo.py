"""The demo: a challenger learns behind a model that stays as it is, takes over by a verdict, learns to game another
hook, and is taken back by the gate.

    python demo.py --out demo-out
    python demo.py --quick

Everything runs under a deadline, and whatever fails leaves no process behind and names the log to read.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from shown import draw, told
from users import Users

from swarm.client import SwarmClient
from swarm.evidence.stages import ServingStage
from swarm.protocol import PolicyStatus

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.experiment import CLI, ExperimentError, call, free_ports, pull, run_config, running, swarm_url  # noqa: E402

MODEL = "smollm2-135m"
BOOT_SECONDS, ACT_SECONDS, COMMAND_SECONDS = 240.0, 900.0, 60.0


@dataclass(frozen=True)
class Demo:
    """The addresses of what runs, and how long each act is.

    Args:
        file: of the running ``up``.
        more: requests that the live challenger answers before the hook is swapped.
        steps: with the swapped hook; 0: the first act only.

    Attributes:
        moves: the stages in which the share changed.
    """

    file: Path
    config: dict[str, Any]
    users: Users
    swarm: SwarmClient
    more: int
    steps: int
    moves: list[ServingStage] = field(default_factory=list[ServingStage])

    @property
    def now(self) -> PolicyStatus | None:
        """The challenger as it stands."""
        policies = self.swarm.policies().policies
        return policies[0] if policies else None

    def until(self, what: str, reached: Callable[[PolicyStatus], bool]) -> PolicyStatus:
        """Wait for it, and tell what moves meanwhile.

        Raises:
            ExperimentError: it was not reached in time, or users got no answers.
        """
        deadline, last = time.monotonic() + ACT_SECONDS, ""
        while time.monotonic() < deadline:
            policy = self.now
            if policy is not None:
                stage, verdict = policy.stage, policy.verdict
                if not self.moves or self.moves[-1].share != stage.share:
                    self.moves.append(stage)
                line = f"version {stage.challenger}, {stage.label}{', training waits' if stage.trial else ''}"
                if line != last:
                    said = f" | {verdict.sentence}" if verdict is not None else ""
                    print(f"  {self.users.answered:4d} answers  {line}{said}", flush=True)
                    last = line
                if reached(policy):
                    return policy
            self.users.check()
            time.sleep(0.2)
        raise ExperimentError(f"{what}: not in {ACT_SECONDS:.0f} s; read {self.file.parent / 'up.log'}")

    def command(self, *arguments: str) -> None:
        """A command of ``swarm-gateway policies``."""
        command = [*CLI, "policies", *arguments, "--swarm-url", swarm_url(self.config)]
        call(command, COMMAND_SECONDS, f"policies {arguments[0]}")

    def swap(self, hooks: Path) -> None:
        """Another hook trains from now on, with no trial before this act ends: an edit of the file that ``up`` was
        started with, and a reload."""
        changed = yaml.safe_load(self.file.read_text())
        changed["gateway"]["hooks"] = str(hooks)
        changed["gateway"]["serve"]["gate"]["trial_every"] = self.steps
        self.file.write_text(yaml.safe_dump(changed, sort_keys=False))
        request = urllib.request.Request(f"{self.users.gateway}/admin/reload", method="POST")
        with _opener().open(request, timeout=COMMAND_SECONDS) as answer:
            print(f"  reloaded: {answer.read().decode().strip()}")

    def play(self) -> None:
        """All acts."""
        print("\n== A challenger learns in the shadow, until the gate lets it take over", flush=True)
        live = self.until("the challenger was not promoted", lambda policy: policy.stage.share == 1)
        enough = self.users.answered + self.more
        self.until("users ask no more", lambda _: self.users.answered >= enough)
        if not self.steps:
            return
        print("\n== It learns on, now with a hook that can be gamed: more words score better", flush=True)
        self.swap(HERE / "longer")
        self.command("rollback", "--reason", "it learns on in the shadow, with another hook")
        version = (live.stage.challenger or 0) + self.steps
        self.until("it does not learn", lambda policy: (policy.stage.challenger or 0) >= version)
        print("\n== Somebody sees how the training reward rose, and promotes it by hand", flush=True)
        self.command("promote", "--share", "0.5", "--reason", "its training reward rose so well")
        back = self.until("nobody took it back", lambda policy: policy.stage.rolled_back)
        print(f"  seen {time.time() - back.stage.at:.1f} s after the verdict", flush=True)
        answered = self.users.answered
        self.until("users ask no more", lambda _: self.users.answered >= answered + 3)


@contextlib.contextmanager
def incumbent(port: int, out: Path) -> Generator[str]:
    """The model that users have today, until the block ends; gives its address.

    Raises:
        ExperimentError: it did not start.
    """
    log = out / "incumbent.log"
    command = [sys.executable, str(HERE / "incumbent.py"), "--port", str(port), "--run-dir", str(out / "incumbent")]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + BOOT_SECONDS
            while not _answers(f"http://127.0.0.1:{port}/v1/models"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ExperimentError(f"the incumbent does not start; read {log}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answers(url: str) -> bool:
    try:
        with _opener().open(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def run(out: Path, every: int, steps: int, more: int, pause: float) -> None:
    """The whole demo, and its picture in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    with incumbent(port, out) as url:
        base = HERE / "config.yaml"
        serve = yaml.safe_load(base.read_text())["gateway"]["serve"]
        serve["incumbent"]["upstream"]["base_url"] = url
        serve["gate"] |= {"hook": str((HERE / serve["gate"]["hook"]).resolve()), "trial_every": every}
        file, config = run_config(base, out / "run", control=False, serve=serve)
        gateway = f"http://127.0.0.1:{config['gateway']['port']}"
        with (
            running(file, out / "run" / "up.log"),
            Users(gateway, MODEL, HERE.parent / "opencode_build_concise_agent", pause) as users,
            SwarmClient(swarm_url(config)) as swarm,
        ):
            demo = Demo(file, config, users, swarm, more, steps)
            demo.play()
    story = told(out / "run" / "run" / "journal.db", demo.moves)
    draw(story, out / "takeover.png")
    print(f"\nusers: {users.sentence}\npicture: {out / 'takeover.png'}")
    for line in story.sentences:
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a challenger take over, and have the gate take it back.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for logs and the picture")
    parser.add_argument("--every", type=int, default=5, help="steps until a verdict is waited for")
    parser.add_argument("--steps", type=int, default=10, help="steps with the hook that can be gamed")
    parser.add_argument("--more", type=int, default=8, help="answers of the live challenger before the hook is swapped")
    parser.add_argument("--pause", type=float, default=2.5, help="seconds that a user reads an answer")
    parser.add_argument("--quick", action="store_true", help="the first act only, with a verdict after 2 steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.every, arguments.steps, arguments.more, arguments.pause = 2, 0, 0, 0.0
    began = time.monotonic()
    # SIGTERM ends the with blocks like Ctrl-C does
    signal.signal(signal.SIGTERM, leave)
    try:
        pull(MODEL)
        run(arguments.out.resolve(), arguments.every, arguments.steps, arguments.more, arguments.pause)
    except ExperimentError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
