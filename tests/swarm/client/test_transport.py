"""Connections: one that broke is replaced at once, an answer that trickles in is bounded, a close leaves nothing."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarm.client import RetryPolicy, SwarmClient
from swarm.errors import StateError, UnavailableError
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_control import SYNCED
from tests.swarm.client.test_sync import claimed

#: A call that fails twice waits this long, which no test here does.
SLOW = RetryPolicy(attempts=3, base=1000.0, cap=1000.0, total=5000.0)


def test_only_the_first_repetition_is_at_once(server: ScriptedServer) -> None:
    waited: list[int] = []

    class Counting(RetryPolicy):
        def delay(self, failures: int, retry_after: float = 0.0) -> float:
            waited.append(failures)
            return 0.001

    server.script("/get_engine_status", DROP)
    with (
        SwarmClient(server.url, policy=Counting(attempts=4)) as client,
        pytest.raises(UnavailableError, match="4 tries"),
    ):
        client.get_engine_status()
    assert waited == [2, 3, 4]


def test_it_is_told_once_that_a_server_is_waited_for(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    server.script("/get_engine_status", *[DROP] * 16, {"engine_status": "ENGINE.ROLLING"}, DROP)
    quick = RetryPolicy(attempts=100, base=0.001, cap=0.002)
    with SwarmClient(server.url, policy=quick) as client:
        client.get_engine_status()
    assert caplog.messages == [
        f"waiting for {server.url}, at most 60 s more: the server closed the connection without an answer"
    ]


def trickling(listening: socket.socket, over: threading.Event) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        # each byte comes well within any timeout for one read
        while not over.wait(0.02):
            try:
                connection.sendall(b" ")
            except OSError:
                return


def test_an_answer_that_trickles_in_is_bounded() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = pool.submit(trickling, listening, over)
        try:
            with (
                pytest.raises(UnavailableError, match=r"longer than 0.2 s"),
                SwarmClient(url, policy=RetryPolicy(attempts=1), request_timeout=0.2) as client,
            ):
                client.get_engine_status()
        finally:
            over.set()
        serving.result(30)


@pytest.mark.parametrize("path", ["/code/abc", "/judged_groups"])
def test_megabytes_may_take_longer_than_other_answers(server: ScriptedServer, path: str) -> None:
    """Over a slow line 64 MB of code, and the tokens of 200 groups, take a minute."""
    sent = threading.Event()
    server.script(path, Answer(b'{"groups": []}', wait=sent))
    with SwarmClient(server.url, policy=RetryPolicy(attempts=1), request_timeout=0.1) as client:
        # well after any other call has been given up
        threading.Timer(0.5, sent.set).start()
        if path == "/judged_groups":
            assert client.judged_groups(tokens=True).groups == []
        else:
            assert client.code_archive("abc") == b'{"groups": []}'


def test_an_upload_that_breaks_late_is_sent_again(server: ScriptedServer) -> None:
    """Of 64 MB that take a minute, as of a call that breaks at once."""
    late = threading.Event()
    server.script("/sync_train_code", Answer(drop=True, wait=late), SYNCED)
    with SwarmClient(server.url, policy=RetryPolicy(attempts=3, total=0.1)) as client:
        threading.Timer(0.5, late.set).start()
        assert client.sync_train_code(b"PK").success
    assert server.bodies("/sync_train_code") == [b"PK", b"PK"]


def test_a_server_that_asks_for_more_time_than_the_policy_has_is_not_waited_for(server: ScriptedServer) -> None:
    """Whatever the call's own timeout: a gateway whose server's disk was full let each user wait."""
    server.script("/sync_train_code", *[Answer({}, 503, headers={"retry-after": "2"})] * 3)
    with SwarmClient(server.url, policy=RetryPolicy(attempts=3, total=1.0)) as client, pytest.raises(UnavailableError):
        client.sync_train_code(b"PK")
    assert len(server.bodies("/sync_train_code")) == 1


def test_a_close_ends_what_waits_between_its_polls(server: ScriptedServer) -> None:
    server.script("/claim_episode", Answer({}, 503))
    client = SwarmClient(server.url, policy=SLOW, begin_timeout=5000.0)
    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(client.begin_episode)
        while not server.requests:
            threading.Event().wait(0.002)
        client.close()
        with pytest.raises(StateError, match="closed"):
            claiming.result(30)


def test_clients_leave_no_thread_and_no_descriptor(server: ScriptedServer) -> None:
    server.script("/claim_episode", claimed())
    server.script("/abort_episode", {"success": True})
    server.script("/status", {"engine": {"engine_status": "ENGINE.ROLLING"}, "engine_changes": 1})

    def once() -> None:
        with SwarmClient(server.url, policy=QUICK) as client:
            client.add_entering_weight_sync_callback(lambda: None)
            client.run_episodes_until_all_complete(range(4), lambda _: client.begin_episode(), max_workers=4)

    def ours() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith(("episodes", "swarm-watch"))]

    once()  # what is imported and cached once
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert ours() == []
    assert len(os.listdir("/proc/self/fd")) <= before + 1
