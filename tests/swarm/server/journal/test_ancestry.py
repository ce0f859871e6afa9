"""Which versions learned from a batch, against a model that remembers what each set of weights has seen."""

from __future__ import annotations

import random
import sqlite3

import pytest

from swarm.server.journal.lineage import versions_of


class Runs:
    """Runs that step, crash, go back, begin anew or go on with what another one saved, as the server writes them."""

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("CREATE TABLE steps (run_id TEXT, batch_id TEXT, step INTEGER)")
        self.batches = 0
        self.run = 0
        #: the batches behind each set of weights in the line of the current one; what was served, run by run
        self.line: list[frozenset[str]] = [frozenset()]
        self.names: list[str] = []
        self.served: list[tuple[str, int, frozenset[str]]] = []

    def write(self, batch: str) -> None:
        self.line.append(self.line[-1] | {batch})
        self.names.append(batch)
        step = len(self.names)
        self.connection.execute("INSERT INTO steps VALUES (?, ?, ?)", (f"run {self.run}", batch, step))
        self.served.append((f"run {self.run}", step, self.line[-1]))

    def step(self) -> None:
        self.batches += 1
        self.write(f"batch {self.batches}")

    def crash(self) -> None:
        """The engine goes on from an earlier checkpoint."""
        saved = self.random.randrange(len(self.line))
        del self.line[saved + 1 :], self.names[saved:]
        self.step()

    def go_back(self) -> None:
        """Another run gets the steps up to one."""
        kept = self.names[: self.random.randrange(len(self.line))]
        self.run += 1
        self.line, self.names = [frozenset()], []
        for batch in kept:
            self.write(batch)
        self.step()

    def begin(self) -> None:
        self.run += 1
        self.line, self.names = [frozenset()], []
        self.step()

    def go_on(self) -> None:
        """Another job, with what this run saved last."""
        self.run += 1
        self.step()


@pytest.mark.parametrize("seed", range(200))
def test_lineage_is_right_in_random_histories(seed: int) -> None:
    runs = Runs(random.Random(seed))
    for _ in range(runs.random.randrange(1, 60)):
        moves = [runs.step, runs.crash, runs.go_back, runs.begin, runs.go_on]
        runs.random.choices(moves, [12, 2, 1, 1, 1])[0]()
    batches = [f"batch {number}" for number in range(1, runs.batches + 1)]
    hers = set(runs.random.sample(batches, runs.random.randrange(min(4, len(batches)) + 1)))
    learned, clean = versions_of(runs.connection, hers)
    assert [(one.run_id, one.step) for one in learned] == [
        (run, step) for run, step, seen in runs.served if seen & hers
    ]
    assert clean == max(step for step, seen in enumerate(runs.line) if not seen & hers)
    current = {one.step for one in learned if one.current}
    assert current == {step for step, seen in enumerate(runs.line) if seen & hers}
