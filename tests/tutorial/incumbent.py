"""In place of a model that vLLM serves: always an answer that never ends."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say({"data": [{"id": "smollm2-135m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "word " * 60}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        self.say({"object": "chat.completion", "id": "1", "created": 1, "model": "m", "choices": [choice]})

    def say(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_model(model: str, name: str, address: tuple[str, int], folder: Path, **_: Any) -> None:
    """As :func:`adapters.verl.serving.serve_model`, without vLLM; it ends with SIGTERM."""
    ThreadingHTTPServer(address, Handler).serve_forever()
