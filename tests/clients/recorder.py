"""``swarm-gateway`` that notes each request of an agent and its answer, as its sessions see them.

``python -m tests.clients.recorder serve --config gateway.yaml``: one JSON object a line, in ``calls.jsonl`` beside the
configuration.

The user makes the gateway fail by words of the last message, once for each client: ``FAIL ONCE`` with a 503,
``BREAK ONCE`` in the midst of a streamed answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from gateway import pipeline
from gateway.cli import main
from gateway.sessions import sessions
from gateway.types import Decided, Live
from swarm.errors import UnavailableError, UpstreamError

#: What an agent may tell of its session; nothing else of its headers is kept.
_TELLING = re.compile(r"session|thread|agent|parent|codex-window|stainless-retry")


def record(path: Path) -> None:
    """Note in ``path`` what is linked and delivered from now on."""
    link, delivered = sessions.Sessions.link, sessions.SessionLink.delivered
    answers: dict[int, dict[str, Any]] = {}

    def noted_link(self: Any, incoming: Any, *args: Any) -> Any:
        made = link(self, incoming, *args)
        headers = {name: value for name, value in incoming.headers.items() if _TELLING.search(name)}
        headers.pop("user-agent", None)
        body = {name: incoming.call.body[name] for name in ("user", "metadata") if name in incoming.call.body}
        answers[id(made)] = {"headers": headers, "body": body, "messages": incoming.call.messages}
        return made

    def noted_delivered(self: Any, completion_id: str, message: dict[str, Any], *args: Any, **more: Any) -> None:
        delivered(self, completion_id, message, *args, **more)
        with path.open("a") as file:
            file.write(json.dumps({**answers.pop(id(self)), "answer": message}) + "\n")

    sessions.Sessions.link, sessions.SessionLink.delivered = noted_link, noted_delivered


def fail_once() -> None:
    """Do what the user orders."""
    answer = pipeline.Pipeline.answer
    done: set[str] = set()

    def ordered(incoming: Any, order: str) -> bool:
        client = incoming.headers.get("user-agent", "").partition("/")[0] + order
        if client in done or order not in str(incoming.call.messages[-1].get("content")):
            return False
        done.add(client)
        return True

    async def broken(chunks: Iterator[Any]) -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk
            raise UpstreamError("it broke, as was ordered")

    async def failing(self: Any, incoming: Any) -> Any:
        if ordered(incoming, "FAIL ONCE"):
            raise UnavailableError("it fails, as was ordered", retry_after=0.1)
        outcome = await answer(self, incoming)
        if incoming.call.stream and ordered(incoming, "BREAK ONCE"):
            assert isinstance(outcome, Decided)
            return Live(broken(outcome.chunks()), outcome.headers, outcome.close)
        return outcome

    pipeline.Pipeline.answer = failing


if __name__ == "__main__":
    fail_once()
    record(Path(sys.argv[sys.argv.index("--config") + 1]).with_name("calls.jsonl"))
    sys.exit(main())
