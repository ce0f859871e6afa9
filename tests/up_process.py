"""``swarm-gateway up`` as a child of a test: its events, and all of its processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import httpx
import psutil
import pytest

from tests.engine.engine_process import processes_with
from tests.processes import children

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")
MARK = "SWARM_UP_TEST"
STOP_SECONDS = 150.0
COMMAND = (sys.executable, "-m", "gateway.cli")
_HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


class Up:
    """``swarm-gateway up`` as a child, whose processes all carry a mark of this run in their environment."""

    def __init__(
        self, config: Path, command: Sequence[str] = COMMAND, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.segments = segments()
        self.seen: list[dict[str, Any]] = []
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [*command, "up", str(config), "--json"],
            cwd=ROOT,
            env={**os.environ, **env, MARK: self.mark, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    event = {"event": "output", "line": line.rstrip()}
                self._events.put(event)
        self._events.put(None)

    def next(self) -> dict[str, Any] | None:
        """The next event of an ``up`` that has ended; ``None`` after the last."""
        return self._events.get()

    def expect(self, kind: str, seconds: float, *, saying: str = "") -> dict[str, Any]:
        """The next event of ``kind`` whose message holds ``saying``: other warnings may come before it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no event {kind!r} within {seconds:.0f} s: {self.seen[-20:]}")
            if event is None:
                pytest.fail(f"`up` ended before an event {kind!r}: {self.seen[-20:]}")
            self.seen.append(event)
            if event["event"] == "failed" and kind != "failed":
                pytest.fail("\n".join([event["message"], *event["last_lines"]]))
            if event["event"] == kind and saying in event.get("message", ""):
                return event

    def url(self, name: str) -> str:
        """Where the server ``name`` said that it listens."""
        return next(one["url"] for one in self.seen if one["event"] == "listening" and one["name"] == name)

    def child(self, *words: str) -> psutil.Process:
        """The only process that it started with these words in its command."""
        [child] = children(*words, of=self.process.pid)
        return child

    def interrupt(self) -> int:
        """One Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_SECONDS)

    def processes(self) -> list[psutil.Process]:
        """Living processes of this run."""
        return processes_with(MARK, self.mark)

    def end(self) -> None:
        """Whatever the test did, leave nothing running."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        left = self.processes()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=10)
        self._reader.join(10)


class Answer(NamedTuple):
    """What a user got; ``status`` 0: nothing."""

    status: int
    seconds: float
    text: str


class Users:
    """Users of the gateway at ``url`` who ask without a pause, and are gone ``patience`` seconds after a question.

    Attributes:
        answers: in their order.
    """

    def __init__(
        self, url: str, body: Mapping[str, Any] = _HELLO, *, key: str = "none", count: int = 3, patience: float = 20.0
    ) -> None:
        self.answers: list[Answer] = []
        self._url, self._body, self._key, self._patience = f"{url}/chat/completions", body, key, patience
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]

    def _ask(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        with httpx.Client(headers=headers, timeout=self._patience, trust_env=False) as http:
            while not self._over.is_set():
                began = time.monotonic()
                try:
                    told = http.post(self._url, json=self._body)
                    status, text = told.status_code, told.text
                except httpx.HTTPError as exc:
                    status, text = 0, repr(exc)
                self.answers.append(Answer(status, time.monotonic() - began, text))
                if not status:
                    self._over.wait(0.2)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Ask no more."""
        self._over.set()
        for thread in self._threads:
            thread.join(self._patience)

    def wait(self, count: int, seconds: float) -> None:
        """Until so many more were answered."""
        enough = len(self.answers) + count
        deadline = time.monotonic() + seconds
        while len(self.answers) < enough:
            assert time.monotonic() < deadline, f"users wait: {self.answers[-5:]}"
            time.sleep(0.05)


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("psm_*")} if SHARED_MEMORY.is_dir() else set()
