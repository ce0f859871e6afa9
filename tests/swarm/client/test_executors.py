"""Executors: bounded submission, periodic drains, and that nothing submitted is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarm.client import BoundedThreadPoolExecutor, PeriodicDrainThreadPoolExecutor

PATIENCE = 30.0


def test_a_submit_blocks_while_so_many_are_pending() -> None:
    release = threading.Event()
    with BoundedThreadPoolExecutor(1, max_pending=2) as pool, ThreadPoolExecutor(1) as other:
        first = [pool.submit(release.wait, PATIENCE) for _ in range(2)]
        third = other.submit(pool.submit, release.wait, PATIENCE)
        assert not third.done()
        with pytest.raises(TimeoutError):
            third.result(0.05)
        release.set()
        assert third.result(PATIENCE).result(PATIENCE)
        assert all(one.result(PATIENCE) for one in first)


def test_a_shutdown_tells_submitters_that_wait() -> None:
    release = threading.Event()
    pool = BoundedThreadPoolExecutor(1)
    running = pool.submit(release.wait, PATIENCE)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pool.submit, release.wait, PATIENCE)
        pool.shutdown(wait=False)
        with pytest.raises(RuntimeError, match="after shutdown"):
            waiting.result(PATIENCE)
    release.set()
    assert running.result(PATIENCE)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(release.wait)


def test_drains_hand_out_every_outcome_once_and_in_order() -> None:
    with PeriodicDrainThreadPoolExecutor[int](workers=4, max_parallel=2) as pool:
        drains = [pool.submit_with_periodic_drain(pow, number, 2) for number in range(10)]
        rest = pool.drain()
        assert pool.drain() == []
    assert [len(one) for one in drains] == [0, 0, 0, 4, 0, 0, 0, 4, 0, 0]
    outcomes = [future.result() for drained in (*drains, rest) for future in drained]
    assert outcomes == [number**2 for number in range(10)]


def test_a_failure_is_an_outcome_too_after_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.wire.RetryPolicy.delay", lambda self, failures, retry_after=0.0: 0.0)
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise ValueError("broken")

    with PeriodicDrainThreadPoolExecutor[None](workers=2) as pool:
        pool.submit(fail)
        [failed] = pool.drain()
    assert isinstance(failed.exception(), ValueError)
    assert len(tries) == 3
