"""Users who ask the questions of ``questions.jsonl`` through the app's own code, with a progress bar and a report.

python mock_user_request.py --until-step 20 --report report/
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from app import Assistant
from openai import APIStatusError, OpenAI, OpenAIError

from gateway.replay.output import print_report, replay_bar, write_report
from gateway.replay.report import Report
from gateway.replay.run import Progress, make_config, replay
from gateway.replay.senders import Outcome, Prompt
from swarm.client import AsyncSwarmClient, RetryPolicy
from swarm.errors import SwarmGatewayError

HERE = Path(__file__).parent


class AppSender:
    """Asks the app in a thread per question: its code is synchronous, as applications are.

    Daemon threads, because neither Ctrl-C nor the time limit waits for an answer that may take minutes.
    """

    def __init__(self, client: OpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def send(self, prompt: Prompt) -> Outcome:
        answer: Future[Outcome] = Future()

        def work() -> None:
            answer.set_running_or_notify_cancel()
            try:
                answer.set_result(self._ask(prompt.text))
            except BaseException as exc:
                answer.set_exception(exc)

        threading.Thread(target=work, name="user", daemon=True).start()
        return await asyncio.wrap_future(answer)

    def _ask(self, question: str) -> Outcome:
        began = time.monotonic()
        try:
            Assistant(self._client, self._model).ask(question)
        except APIStatusError as exc:
            return Outcome(time.monotonic() - began, f"HTTP {exc.status_code}", exc.message)
        except OpenAIError as exc:
            return Outcome(time.monotonic() - began, type(exc).__name__, str(exc))
        return Outcome(time.monotonic() - began)


async def run(arguments: argparse.Namespace, show: Callable[[Progress], None]) -> Report:
    config = make_config(
        data=arguments.data,
        target="app.py",
        model=arguments.model,
        label=arguments.label,
        concurrency=arguments.concurrency,
        epochs=None if arguments.until_step else 1,
        until_step=arguments.until_step,
        time_limit=arguments.time_limit,
        seed=arguments.seed,
    )
    client = OpenAI(base_url=arguments.base_url, api_key="none", timeout=300.0)
    # the next poll of the server is the retry
    async with AsyncSwarmClient(arguments.swarm_url, policy=RetryPolicy(attempts=1)) as swarm:
        return await replay(config, AppSender(client, arguments.model), swarm, show)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the app the questions of a file and report the rewards by step.")
    parser.add_argument("--data", type=Path, default=HERE / "questions.jsonl")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the gateway")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086", help="the swarm server")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=4, help="users at once")
    parser.add_argument("--until-step", type=int, help="go on until this training step; default: once through the data")
    parser.add_argument("--time-limit", type=float, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="run")
    parser.add_argument("--report", type=Path, help="folder for report.json and report.png")
    arguments = parser.parse_args()
    try:
        with replay_bar() as show:
            report = asyncio.run(run(arguments, show))
        if arguments.report:
            write_report(report, arguments.report)
    except SwarmGatewayError as exc:
        print(f"mock_user_request: {exc.message}", file=sys.stderr)
        return 2
    print_report(report)
    if report.interrupted:
        return 130
    return 1 if report.failed and not report.answered else 0


if __name__ == "__main__":
    sys.exit(main())
