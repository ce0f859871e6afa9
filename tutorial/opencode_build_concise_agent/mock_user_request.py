"""Users who ask the questions of ``questions.jsonl`` through the app's own code, with a progress bar and a report.

python mock_user_request.py --quick
python mock_user_request.py --steps 20 --report runs/report
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

from app import Assistant
from openai import APIStatusError, OpenAI, OpenAIError

from gateway.replay.senders import Outcome
from swarm.types import Task

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.users import Address, main  # noqa: E402


class AppSender:
    """Asks the app in a thread per question: its code is synchronous, as applications are.

    Daemon threads, because neither Ctrl-C nor the time limit waits for an answer that may take minutes.
    """

    def __init__(self, to: Address) -> None:
        self._client = OpenAI(base_url=to.base_url, api_key="none", timeout=300.0)
        self._model = to.model

    async def send(self, task: Task) -> Outcome:
        answer: Future[Outcome] = Future()

        def work() -> None:
            answer.set_running_or_notify_cancel()
            try:
                answer.set_result(self._ask(task.main_query))
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


if __name__ == "__main__":
    sys.exit(main(lambda to: nullcontext(AppSender(to)), HERE / "questions.jsonl", "app.py"))
