"""A storm of requests whose texts must not be kept, with SIGKILLs of gateway and server in it; then the search.

All that the processes write is below one folder: the run folder, logs, keys, the store, and what they would put into
the system's temporary folders. Three marks tell texts apart. ``REFUSED`` is in texts of who says no and in private
parts of prompts, which are on disk at no moment; ``INVENTED`` in private parts that the model itself writes, whose
tokens are in the journal until their group is given back; ``TRAINED`` in texts of who agrees, and has to be found.

Invariant: whatever it starts is dead when it returns. What it cannot see: the memory of processes.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.keys.store import KeyFile
from swarm.http.client import ConnectionBrokenError, HttpClient
from swarm.server.journal.schema import reading
from swarm.tokens import TrainBatch
from tests.gateway.conftest import write_hooks
from tests.gateway.resilience.rig import REWARD
from tests.kill.up import ENGINE_VARIABLE
from tests.ports import free_ports
from tests.processes import children
from tests.standins.engine import FOLDER_VARIABLE
from tests.standins.spelling import INVENTED, REFUSED, TRAINED, read, spelled
from tests.up_process import COMMAND, Up

#: Who asks: the route, headers, and what is private in it: the whole ``text``, its ``prompt``, or the ``answer``.
CALLERS: dict[str, tuple[str, dict[str, str], str]] = {
    "header": ("plain", {"x-swarm-train": "false"}, "text"),
    "key": ("plain", {}, "text"),
    "key against the header": ("plain", {"x-swarm-train": "true"}, "text"),
    "session": ("plain", {"x-swarm-train": "false; session", "x-swarm-session": "hers"}, "text"),
    "route": ("asking", {}, "text"),
    "withheld prompt": ("withheld", {}, "prompt"),
    "withheld answer": ("withheld", {}, "answer"),
    "withheld token ids": ("withheld", {}, "tokens"),
    "masked prompt": ("masked", {}, "prompt"),
    "masked answer": ("masked", {}, "answer"),
    "masked token ids": ("masked", {}, "tokens"),
    "agrees": ("plain", {}, ""),
}
ROUTES = {
    "plain": {},
    "asking": {"consent": "opt_in"},
    "withheld": {"redact": "group"},
    "masked": {"redact": "before_sampling"},
}
DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
#: Whose process gets the SIGKILL, in turn.
VICTIMS = {"gateway": ("serve",), "server": ("swarm", "start")}
_PATIENCE, _START_SECONDS, _SETTLE_SECONDS, _AT_ONCE = 300.0, 180.0, 120.0, 12


@dataclass
class Storm:
    """One run in ``folder``.

    Attributes:
        found: marks that must not be there: when, which, in what form, in which file.
        controls: files with a mark of who agrees, by its form.
        rows: what the trainer was given.
    """

    folder: Path
    seed: int
    asked: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    kills: Counter[str] = field(default_factory=Counter[str])
    found: list[str] = field(default_factory=list[str])
    controls: Counter[str] = field(default_factory=Counter[str])
    rows: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._kept, self._witness = self.folder / "kept", self.folder / "witness"
        for made in (self._kept, self._witness, self._kept / "tmp"):
            made.mkdir(parents=True)
        self._swarm_port, port = free_ports(2)
        self._url = f"http://127.0.0.1:{port}"
        keys = KeyFile(self._kept / "keys.json")
        self._keys = {name: keys.create(name, train=train)[1] for name, train in (("app", None), ("never", False))}
        self._done, self._over = 0, threading.Event()
        self._failed: BaseException | None = None
        self._write(port)

    def run(self, requests: int, kills: int) -> None:
        """Send ``requests``, kill ``kills`` times among them, stop, and search."""
        began = time.monotonic()
        self._up = self._start()
        users = threading.Thread(target=self._ask_all, args=(requests,))
        try:
            users.start()
            for number in range(kills):
                after = (number + self._random.random()) * requests / (kills + 1)
                self._until(lambda after=after: self._done >= after, 3600.0, "requests are not answered")
                self._kill(list(VICTIMS)[number % len(VICTIMS)])
                self._search(f"after kill {number + 1}", REFUSED)
                print(f"{time.monotonic() - began:6.0f} s  {self._done} asked, {number + 1} kills", file=sys.stderr)
            users.join()
            if self._failed is not None:
                raise self._failed
            self._until(self._rests, _SETTLE_SECONDS, "the server does not come to rest")
            self._until(lambda: not self._places(INVENTED), _SETTLE_SECONDS, "private answers stay in the journal")
            self._search("at rest", REFUSED)
            assert self._up.interrupt() == 0, self._up.seen[-5:]
        finally:
            self._over.set()
            self._up.end()
            users.join()
        self._search("after the end", REFUSED, INVENTED)
        self._look_into_batches()
        with reading(self._kept / "run" / "journal.db") as journal:
            asked = "SELECT count(*) FROM episodes WHERE drop_reason = 'private_data'"
            (self._given_back,) = journal.execute(asked).fetchone()
        self.controls.update(form for _, form, _ in self._places(TRAINED))
        self._seconds = time.monotonic() - began

    def summary(self) -> dict[str, Any]:
        """What it has shown."""
        return {
            "seed": self.seed,
            "seconds": round(self._seconds, 1),
            "requests": sum(self.asked.values()),
            "of": dict(self.asked),
            "answers": dict(self.answers),
            "kills": dict(self.kills),
            "bytes_searched": sum(path.stat().st_size for path in self._files()),
            "files_with_a_text_of_who_agrees": dict(self.controls),
            "private_answers_given_back": self._given_back,
            "trained_rows": dict(self.rows),
        }

    # ------------------------------------------------------------------ processes

    def _write(self, port: int) -> None:
        write_hooks(self._kept / "hooks", REWARD)
        model = self._kept / "stand-in"
        model.mkdir()
        (model / "config.json").write_text("{}")
        job: dict[str, Any] = {"model": str(model), "batch_size": 3, "num_repeat": 2, "max_parallel_episodes": 32}
        job |= {"max_staleness": 50, "save_freq": 20, "serving": "always"}
        # a group whose gateway was killed is soon given up
        swarm = {"run_dir": "run", "port": self._swarm_port, "stop_grace": 1.0, "max_episode_seconds": 8.0}
        gateway: dict[str, Any] = {
            "hooks": "hooks",
            "port": port,
            "keys_file": "keys.json",
            "access_log": True,
            "request_log": {"path": "run/requests.jsonl"},
            "claim_wait_seconds": 5.0,
            "submit_timeout_seconds": 5.0,
            "sample_timeout_seconds": 5.0,
            "routes": [{"name": name, "data": data} for name, data in ROUTES.items()],
        }
        told = {"job": job, "swarm": swarm, "gateway": gateway}
        (self._kept / "up.yaml").write_text(yaml.safe_dump(told))

    def _start(self) -> Up:
        temporary = str(self._kept / "tmp")
        env = {FOLDER_VARIABLE: str(self._witness), ENGINE_VARIABLE: "spelling"}
        env |= dict.fromkeys(("TMPDIR", "SQLITE_TMPDIR"), temporary)
        up = Up(self._kept / "up.yaml", (*COMMAND[:-1], "tests.kill.up"), env)
        up.expect("ready", _START_SECONDS)
        return up

    def _kill(self, victim: str) -> None:
        self.kills[victim] += 1
        for child in children(*VICTIMS[victim], of=self._up.process.pid):
            child.kill()
        if victim == "gateway":
            self._up.expect("gateway_recovered", _START_SECONDS)
            return
        # `up` ends with its server
        code = self._up.process.wait(_START_SECONDS)
        assert code in (1, -signal.SIGKILL), code
        self._search(f"dead, kill {self.kills.total()}", REFUSED)
        self._up.end()
        self._up = self._start()

    def _rests(self) -> bool:
        status = httpx.get(f"http://127.0.0.1:{self._swarm_port}/status", timeout=30, trust_env=False).json()
        log = self._kept / "run" / "journal.db-wal"
        return not status["pool"]["running_episodes"] and not (log.exists() and log.stat().st_size)

    def _until(self, condition: Any, within: float, otherwise: str) -> None:
        deadline = time.monotonic() + within
        while not condition():
            if self._failed is not None:
                raise self._failed
            assert time.monotonic() < deadline, f"{otherwise} within {within:g} s; {self._up.seen[-3:]}"
            time.sleep(0.02)

    # ------------------------------------------------------------------ traffic

    def _ask_all(self, requests: int) -> None:
        try:
            asyncio.run(self._traffic(requests))
        except BaseException as exc:
            self._failed = exc

    async def _traffic(self, requests: int) -> None:
        numbers = iter(range(requests))
        http = HttpClient()

        async def user() -> None:
            for number in numbers:
                if self._over.is_set():
                    return
                await self._one(http, number)
                self._done += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(user())
        finally:
            await http.close()

    async def _one(self, http: HttpClient, number: int) -> None:
        draw = random.Random(f"{self.seed} {number}")
        who = draw.choice(list(CALLERS))
        route, headers, private = CALLERS[who]
        path = DIALECTS[1] if private == "tokens" else draw.choice(DIALECTS)
        key = self._keys["never" if who.startswith("key") else "app"]
        headers = {"authorization": f"Bearer {key}", "x-api-key": key, **headers}
        if policy := draw.choice(("", "best", "first")):
            headers["x-swarm-policy"] = policy
        if twice := draw.random() < 0.15:
            headers["idempotency-key"] = f"{self.seed}-{number}"
        body = {"model": route, "stream": draw.random() < 0.5, **_asked(path, private, number)}
        cut = draw.random() < 0.15
        self.asked[who] += 1
        deadline = time.monotonic() + _PATIENCE
        for attempt in range(1000):
            # as OpenAI's SDK counts them
            sent = headers | {"x-stainless-retry-count": str(attempt)}
            tries = [self._send(http, path, body, sent, cut=cut, draw=draw) for _ in range(2 if twice else 1)]
            told = await asyncio.gather(*tries)
            self.answers.update(told)
            if not any(one == "nobody" or one.startswith("5") for one in told):
                return
            assert time.monotonic() < deadline and not self._over.is_set(), f"{who} gets no answer: {told}"
            await asyncio.sleep(0.3)

    async def _send(
        self, http: HttpClient, path: str, body: Any, headers: Any, *, cut: bool, draw: random.Random
    ) -> str:
        leaves = cut and not body["stream"]
        content, headers = json.dumps(body).encode(), headers | {"content-type": "application/json"}
        try:
            async with asyncio.timeout(draw.uniform(0.0, 0.1) if leaves else _PATIENCE):
                async with http.posted(self._url + path, content, headers) as answer:
                    async for _ in answer.parts():
                        if cut:
                            return "left"
                    return str(answer.status)
        except TimeoutError:
            return "left" if leaves else "nobody"
        except ConnectionBrokenError:
            return "nobody"

    # ------------------------------------------------------------------ the search

    def _files(self) -> list[Path]:
        return [path for path in self._kept.rglob("*") if path.is_file()]

    def _places(self, mark: str) -> list[tuple[str, str, Path]]:
        """Each file with ``mark``, and in which form."""
        places: list[tuple[str, str, Path]] = []
        for path in self._files():
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            places += [(mark, form, path) for form, sought in forms(mark).items() if sought in content]
        return places

    def _search(self, when: str, *marks: str) -> None:
        for mark in marks:
            for _, form, path in self._places(mark):
                self.found.append(f"{when}: {mark} as {form} in {path.relative_to(self._kept)}")

    def _look_into_batches(self) -> None:
        """What verl would be given, read."""
        from adapters.verl.feed import batch_rows

        for path in sorted((self._witness / "batches").iterdir()):
            batch: TrainBatch = pickle.loads(path.read_bytes())
            for rows in batch_rows(batch, [str(number) for number in range(len(batch.groups))], 1):
                for fields in rows.fields:
                    text = read(fields["input_ids"].tolist())
                    self.rows[TRAINED if TRAINED in text else "masked" if "[EMAIL_1]" in text else "others"] += 1
                    if REFUSED in text or INVENTED in text:
                        self.found.append(f"trained: {text}")


def forms(mark: str) -> dict[str, bytes]:
    """How ``mark`` may stand on a disk: as text, and as tokens."""
    ids = spelled(mark)
    packed = {f"int{8 * size}": b"".join(one.to_bytes(size, "little") for one in ids) for size in (2, 4, 8)}
    listed = {f"JSON {between!r}": between.join(map(str, ids)).encode() for between in (",", ", ")}
    return {"text": mark.encode(), **packed, **listed}


def _asked(path: str, private: str, number: int) -> dict[str, Any]:
    if private == "tokens":
        return {"prompt": spelled(f"write to {REFUSED}{number}@example.org")}
    text = {
        "": f"tell me of {TRAINED}{number}",
        "text": f"tell me of {REFUSED}{number}",
        "prompt": f"write to {REFUSED}{number}@example.org",
        "answer": f"INVENT {number}",
    }[private]
    messages = [{"role": "user", "content": text}]
    match path:
        case "/v1/completions":
            return {"prompt": text, "max_tokens": 99}
        case "/v1/responses":
            return {"input": text, "store": True}
        case "/v1/messages":
            return {"messages": messages, "max_tokens": 99}
        case _:
            return {"messages": messages}
