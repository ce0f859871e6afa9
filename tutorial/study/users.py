"""The command line of a tutorial's ``mock_user_request.py``: users, a progress bar, rewards by step, a report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from gateway.replay.bar import replay_bar
from gateway.replay.run import ReplayProgress, make_config, replay
from gateway.replay.senders import Sender
from gateway.reports.printing import print_report, write_report
from gateway.reports.report import Report
from swarm.client import AsyncSwarmClient, RetryPolicy
from swarm.errors import SwarmGatewayError

_QUICK_STEPS = 2


@dataclass(frozen=True)
class Address:
    """Where users send their requests: the gateway, and the model to ask for; ``options`` is the whole command line."""

    base_url: str
    model: str
    options: argparse.Namespace


def main(
    sender: Callable[[Address], AbstractAsyncContextManager[Sender]],
    data: Path,
    target: str,
    more: argparse.ArgumentParser | None = None,
) -> int:
    """Let users send ``data``; returns the exit code.

    Args:
        sender: makes what sends one prompt: through the app's code or its command line, or as HTTP.
        data: the default of ``--data``.
        target: what the report calls the thing that was asked.
        more: has options of the tutorial's own.
    """
    arguments = _parsed(data, more)

    async def run(show: Callable[[ReplayProgress], None]) -> Report:
        config = make_config(
            data=arguments.data,
            target=target,
            model=arguments.model,
            label=arguments.label,
            concurrency=arguments.concurrency,
            epochs=None if arguments.steps else 1,
            steps=arguments.steps,
            time_limit=arguments.time_limit,
            seed=arguments.seed,
        )
        # the next poll of the server is the retry
        swarm = AsyncSwarmClient(arguments.swarm_url, policy=RetryPolicy(attempts=1))
        async with swarm, sender(Address(arguments.base_url, arguments.model, arguments)) as users:
            return await replay(config, users, swarm, show)

    try:
        with replay_bar() as show:
            report = asyncio.run(run(show))
        if arguments.report:
            write_report(report, arguments.report)
    except SwarmGatewayError as exc:
        print(f"mock_user_request: {exc.message}", file=sys.stderr)
        return 2
    print_report(report)
    return report.exit_code


def _parsed(data: Path, more: argparse.ArgumentParser | None) -> argparse.Namespace:
    described = "Users who ask what is in a file, and the rewards by step."
    parser = argparse.ArgumentParser(description=described, parents=[more] if more else [])
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the gateway")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086", help="the swarm server")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=4, help="users at once")
    parser.add_argument("--steps", type=int, help="go on for so many training steps; default: once through the data")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_STEPS} training steps")
    parser.add_argument("--time-limit", type=float, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="run")
    parser.add_argument("--report", type=Path, help="folder for report.json and report.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = _QUICK_STEPS
    return arguments
