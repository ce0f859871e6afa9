"""``python -m tests.kill --kills 200``: the kill test at full length; prints what it did as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import get_args

from swarm.job import ServingMode
from tests.kill.harness import Harness
from tests.kill.invariants import violations
from tests.kill.report import summary


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--serving", choices=get_args(ServingMode), default="always", help="when episodes run")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of all choices; default: any")
    parser.add_argument("--folder", type=Path, help="where the witnesses are left; default: nowhere")
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = asyncio.run(Harness(folder, options.seed, options.serving).run(options.kills))
    wrong = violations(outcome.witnesses)
    text = json.dumps(summary(outcome) | {"violations": wrong}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
