"""``swarm-gateway`` that notes each request of an agent and its answer, as its sessions see them.

``python -m tests.clients.recorder serve --config gateway.yaml``: one JSON object a line, in ``calls.jsonl`` beside the
configuration.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from gateway.cli import main
from gateway.sessions import sessions

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


if __name__ == "__main__":
    record(Path(sys.argv[sys.argv.index("--config") + 1]).with_name("calls.jsonl"))
    sys.exit(main())
