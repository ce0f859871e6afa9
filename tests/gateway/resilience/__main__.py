"""``python -m tests.gateway.resilience``: what users notice of each trouble, and what is left behind, as JSON.

Ends with 1 if anybody saw an error or anything leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.gateway.resilience import leaving, scenarios
from tests.gateway.resilience.rig import Rig, running

Scenario = Callable[[Rig, int, int, int], Awaitable[dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.resilience", description=__doc__)
    parser.add_argument("--syncs", type=int, default=100, help="weight syncs")
    parser.add_argument("--users", type=int, default=16, help="at a time")
    parser.add_argument("--disconnects", type=int, default=1000, help="users who hang up")
    parser.add_argument("--restarts", type=int, default=3, help="of the swarm server, by SIGKILL")
    parser.add_argument("--crashes", type=int, default=3, help="of the trainer, by SIGKILL")
    parser.add_argument("--hangs", type=int, default=12, help="of the judge")
    parser.add_argument("--shadow", type=int, default=2000, help="requests that an incumbent answers in all troubles")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of all choices; default: any")
    parser.add_argument("--folder", type=Path, help="where logs are left; default: nowhere")
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args()
    plan: dict[str, tuple[Scenario, int]] = {
        "syncs": (scenarios.syncs, options.syncs),
        "disconnects": (leaving.disconnects, options.disconnects),
        "restarts": (scenarios.restarts, options.restarts),
        "crashes": (scenarios.crashes, options.crashes),
        "hanging_judge": (scenarios.hanging_judge, options.hangs),
        "shadow": (scenarios.shadow, options.shadow),
    }
    report: dict[str, Any] = {"seed": options.seed}
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        for name, (scenario, wanted) in plan.items():
            if wanted:
                (folder / name).mkdir(parents=True)
                report[name] = asyncio.run(run(folder / name, scenario, wanted, options.seed, options.users))
    text = json.dumps(report, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(1 if harmed(report) else 0)


async def run(folder: Path, scenario: Scenario, wanted: int, seed: int, users: int) -> dict[str, Any]:
    async with running(folder) as rig:
        return await scenario(rig, wanted, seed, users)


def harmed(report: dict[str, Any]) -> list[str]:
    """The scenarios of ``report`` in which somebody saw an error or something was left behind."""
    figures = {name: part for name, part in report.items() if isinstance(part, dict)}
    return [name for name, part in figures.items() if part["errors"] or any(part["leaks"].values())]


if __name__ == "__main__":
    main()
