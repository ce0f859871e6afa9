"""Users who ask the questions of the concise agent through its own app, one after another, until the block ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import httpx
from openai import OpenAI, OpenAIError

from swarm.data import read_tasks
from swarm.importer import SourceFolder

COUNT = 2
#: Failures in a row after which nobody goes on.
MOST_FAILURES = 10


class Users:
    """So many users as :data:`COUNT`; a context manager.

    Args:
        gateway: its address.
        model: that the app asks for.
        folder: of the app and its questions.
        pause: seconds for which a user reads an answer.
    """

    def __init__(self, gateway: str, model: str, folder: Path, pause: float) -> None:
        self.gateway = gateway
        self._assistant, self._model, self._pause = SourceFolder(folder).module("app").Assistant, model, pause
        self._questions = itertools.cycle(task.main_query for task in read_tasks(folder / "questions.jsonl"))
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, name="user", daemon=True) for _ in range(COUNT)]
        self._in_a_row, self._why = 0, ""
        self._seconds: list[float] = []
        #: answers by who gave them, and failures by their kind
        self.sources: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    @property
    def answered(self) -> int:
        return self.sources.total()

    @property
    def sentence(self) -> str:
        """How they fared."""
        by = ", ".join(f"{count} by the {name}" for name, count in sorted(self.sources.items()))
        seconds = sorted(self._seconds)
        places = [seconds[int(len(seconds) * share)] for share in (0.5, 0.95)] if seconds else [0.0, 0.0]
        return (
            f"{self.answered} answers, {by}; {self.failures.total()} failures; p50 {places[0]:.1f} s, "
            f"p95 {places[1]:.1f} s"
        )

    def check(self) -> None:
        """Raise what users got instead of answers."""
        if self._in_a_row >= MOST_FAILURES:
            raise RuntimeError(f"users get no answers: {self._why}")

    def _ask(self) -> None:
        # what the SDK takes is httpx's, by whatever name it brings it along
        http: Any
        with httpx.Client(event_hooks={"response": [self._note]}, trust_env=False, timeout=120) as http:
            client = OpenAI(base_url=f"{self.gateway}/v1", api_key="none", http_client=http, max_retries=0)
            app: Any = self._assistant(client, self._model)
            while not self._over.is_set():
                with self._lock:
                    question = next(self._questions)
                began = time.monotonic()
                try:
                    app.ask(question)
                except OpenAIError as exc:
                    self.failures[type(exc).__name__] += 1
                    self._in_a_row, self._why = self._in_a_row + 1, str(exc)
                    self._over.wait(1.0)
                else:
                    self._in_a_row = 0
                    self._seconds.append(time.monotonic() - began)
                self._over.wait(self._pause)

    def _note(self, response: httpx.Response) -> None:
        if response.is_success:
            with self._lock:
                self.sources[response.headers.get("x-swarm-source", "nobody")] += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)
