"""A swarm server that does as it is told, over real sockets: it drops replies, answers errors, stops and comes back."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Answer:
    """One scripted answer; ``drop`` closes the connection after reading the request, ``wait`` holds it up before."""

    body: Any = field(default_factory=lambda: {"success": True})
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    drop: bool = False
    wait: threading.Event | None = None


DROP = Answer(drop=True)


@dataclass
class Received:
    """One request as it came."""

    path: str
    body: Any
    headers: dict[str, str]
    query: str = ""


class ScriptedServer:
    """Answers each path from its script, and with the script's last answer ever after."""

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self._scripts: dict[str, deque[Answer]] = defaultdict(deque)
        self._lock = threading.Lock()
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, path: str, *answers: Answer | Any) -> None:
        """Answer ``path`` with these in turn; what is no ``Answer`` is the body of a good one."""
        with self._lock:
            self._scripts[path] = deque(one if isinstance(one, Answer) else Answer(one) for one in answers)

    def bodies(self, path: str) -> list[Any]:
        """What was sent to ``path`` so far."""
        return [one.body for one in self.requests if one.path == path]

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = _Server(("127.0.0.1", self.port), _handler(self._take))
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="scripted-server")
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; connections are refused until :meth:`start`."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take(self, received: Received) -> Answer:
        with self._lock:
            self.requests.append(received)
            script = self._scripts[received.path]
            if not script:
                return Answer({"error": {"message": f"nothing scripted for {received.path}"}}, 404)
            return script.popleft() if len(script) > 1 else script[0]


class _Server(ThreadingHTTPServer):
    # a kept-alive connection must not hold up stop()
    daemon_threads = True
    block_on_close = False


def _handler(take: Callable[[Received], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # HTTP/1.0: one request per connection, so that a stopped server leaves no connection open
        protocol_version = "HTTP/1.0"

        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            text = self.rfile.read(length)
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            is_json = headers.get("content-type") == "application/json"
            answer = take(Received(path, json.loads(text) if is_json else text or None, headers, query))
            if answer.wait is not None:
                answer.wait.wait(30)
            if answer.drop:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # the client left, or a dropped reply
                self.close_connection = True

        def finish(self) -> None:
            try:
                super().finish()
            except OSError:
                self.close_connection = True

    return Handler
