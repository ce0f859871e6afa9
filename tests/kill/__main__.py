"""``python -m tests.kill --kills 200``: the kill test at full length; prints what it did as JSON.

``--up``: ``swarm-gateway up`` and what it started are killed instead, and the same command is run again after each;
``--engine real``: on a tiny model. A Ctrl-C or a SIGTERM then ends the killing, and the report follows.

``--unkept 10000 --kills 20``: so many requests whose texts must not be kept, and a search for them.

``--stages 20``: so many rollbacks are timed, then as many SIGKILLs of the swarm server and of a gateway come in the
midst of each transition of a stage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from swarm.concurrency import on_signals
from swarm.job import ServingMode
from tests.kill.going_on import Deadlines, GoingOn
from tests.kill.harness import Harness
from tests.kill.invariants import violations
from tests.kill.report import summary
from tests.kill.stages import EVERY, killing
from tests.kill.unkept import Storm


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--serving", choices=get_args(ServingMode), default="always", help="when episodes run")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of all choices; default: any")
    parser.add_argument("--folder", type=Path, help="where the witnesses are left; default: nowhere")
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--up", action="store_true", help="kill `up`, gateway, server and trainer")
    parser.add_argument("--engine", choices=("stand-in", "real"), default="stand-in", help="of --up")
    parser.add_argument("--unkept", type=int, metavar="REQUESTS", help="search for texts that must not be kept")
    parser.add_argument("--stages", type=int, metavar="POINTS", help="kill at so many points of each transition")
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.unkept:
            storm = Storm(folder, options.seed)
            storm.run(options.unkept, options.kills)
            told = storm.summary() | {"violations": storm.found}
        elif options.stages:
            told = asyncio.run(killing(folder, options.seed, options.stages, options.stages, EVERY))
        elif options.up:
            told = _kill_up(folder, options.seed, options.kills, real=options.engine == "real")
        else:
            outcome = asyncio.run(Harness(folder, options.seed, options.serving).run(options.kills))
            told = summary(outcome) | {"violations": violations(outcome.witnesses)}
    text = json.dumps(told, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(1 if told["violations"] else 0)


def _kill_up(folder: Path, seed: int, kills: int, *, real: bool) -> dict[str, Any]:
    model, deadlines = None, Deadlines()
    if real:
        from tests.engine import tiny_model

        model = tiny_model.build(folder / "tiny")
        deadlines = Deadlines(ready=600.0, progress=300.0, gone=120.0, finish=600.0)
    going = GoingOn(folder, seed, model, deadlines)
    with on_signals(going.enough.set, signal.SIGINT, signal.SIGTERM):
        going.run(kills)
    return going.summary()


if __name__ == "__main__":
    main()
