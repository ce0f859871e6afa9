"""The demo in two acts. A challenger learns behind a model that stays as it is, and takes over by a verdict. Another
one learns by a hook that can be gamed, is promoted by hand, and is taken back by the gate.

    python demo.py --out demo-out
    python demo.py --quick

Everything runs under a deadline, and whatever fails leaves no process behind and names the log to read.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from shown import draw, told
from users import Users

from swarm.client import SwarmClient
from swarm.http.serve import free_port
from swarm.protocol import PolicyStatus

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.experiment import CLI, ExperimentError, call, pull, run_config, running, swarm_url  # noqa: E402

MODEL = "smollm2-135m"
CONCISE = HERE.parent / "opencode_build_concise_agent"
#: of each act what happens, and the hook that trains
ACTS = {
    "takes_over": ("A challenger learns in the shadow, and the gate lets it take over", CONCISE),
    "is_taken_back": ("Another one learns by a hook that can be gamed, and the gate takes it back", HERE / "longer"),
}
ACT_SECONDS, COMMAND_SECONDS = 900.0, 60.0


@dataclass(frozen=True)
class Demo:
    """The addresses of what runs, and how long each act is.

    Args:
        file: of the running ``up``.
        every: steps until a verdict is waited for.
        more: answers before the act ends.
    """

    file: Path
    config: dict[str, Any]
    users: Users
    swarm: SwarmClient
    every: int
    more: int

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

    def takes_over(self) -> None:
        """It learns in the shadow, and the gate lets it take over."""
        self.until("the challenger was not promoted", lambda policy: policy.stage.share == 1)
        enough = self.users.answered + self.more
        self.until("users ask no more", lambda _: self.users.answered >= enough)

    def is_taken_back(self) -> None:
        """It learns in the shadow, somebody promotes it by hand, and the gate takes it back."""
        self.until("it does not learn", lambda policy: (policy.stage.challenger or 0) >= self.every)
        print("  somebody sees how the training reward rose, and promotes it by hand", flush=True)
        self.command("promote", "--share", "0.5", "--reason", "its training reward rose so well")
        back = self.until("nobody took it back", lambda policy: policy.stage.rolled_back)
        print(f"  seen {time.time() - back.stage.at:.1f} s after the verdict", flush=True)
        enough = self.users.answered + self.more
        self.until("users ask no more", lambda _: self.users.answered >= enough)


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def run(out: Path, act: str, hooks: Path, every: int, more: int, pause: float) -> None:
    """One act, its picture and its sentences in ``out``."""
    port = free_port()
    folder = out / act
    folder.mkdir(parents=True, exist_ok=True)
    base = HERE / "config.yaml"
    serve = yaml.safe_load(base.read_text())["gateway"]["serve"]
    serve["incumbent"]["port"] = port
    serve["gate"] |= {"hook": str((HERE / serve["gate"]["hook"]).resolve()), "trial_every": every}
    file, config = run_config(base, folder, control=False, serve=serve, hooks=str(hooks.resolve()))
    gateway = f"http://127.0.0.1:{config['gateway']['port']}"
    with (
        running(file, folder / "up.log"),
        Users(gateway, MODEL, CONCISE, pause) as users,
        SwarmClient(swarm_url(config)) as swarm,
    ):
        demo = Demo(file, config, users, swarm, every, more)
        demo.takes_over() if act == "takes_over" else demo.is_taken_back()
    story = told(folder / "run" / "journal.db")
    draw(story, out / f"{act}.png")
    print(f"users: {users.sentence}\npicture: {out / f'{act}.png'}", *story.sentences, sep="\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a challenger take over, and have the gate take it back.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for logs and the picture")
    parser.add_argument("--act", choices=ACTS, help="one act only")
    parser.add_argument("--every", type=int, default=5, help="steps until a verdict is waited for")
    parser.add_argument("--more", type=int, default=4, help="answers before an act ends")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that a user reads an answer")
    parser.add_argument("--quick", action="store_true", help="the first act, with a verdict after 2 steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.act, arguments.every, arguments.more, arguments.pause = "takes_over", 2, 0, 0.0
    began = time.monotonic()
    # SIGTERM ends the with blocks like Ctrl-C does
    signal.signal(signal.SIGTERM, leave)
    try:
        pull(MODEL)
        for act, (what, hooks) in ACTS.items():
            if arguments.act in (None, act):
                print(f"\n== {what}", flush=True)
                run(arguments.out.resolve(), act, hooks, arguments.every, arguments.more, arguments.pause)
    except ExperimentError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
