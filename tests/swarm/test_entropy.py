"""Random bytes: as many as asked for, none twice, also across a fork."""

from __future__ import annotations

import os

from swarm.entropy import Entropy, random_bytes


def test_lengths_and_no_repetition() -> None:
    taken = [random_bytes(count) for count in range(8, 64) for _ in range(50)]
    assert [len(one) for one in taken[::50]] == list(range(8, 64))
    assert len(set(taken)) == len(taken)


def test_what_is_left_over_is_not_given_out_after_forgetting() -> None:
    entropy = Entropy()
    entropy.take(16)
    twin = Entropy()
    twin._chunk, twin._used = entropy._chunk, entropy._used
    twin.forget()
    assert entropy.take(16) != twin.take(16)


def test_a_fork_gives_out_others() -> None:
    random_bytes(16)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, random_bytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    try:
        assert os.read(reading, 16) != random_bytes(16)
    finally:
        os.close(reading)
        os.close(writing)
