"""Whatever is recorded, and wherever the machine dies, what comes back is what a plain reading of the records says."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.server.journal.reading import recover
from swarm.server.journal.records import (
    AgreementsEnded,
    BatchFailed,
    BatchTaken,
    CallRecorded,
    ClientAgreed,
    EpisodeEnded,
    EpisodeKeyAdded,
    EpisodeQuarantined,
    EpisodesDropped,
    GroupLosses,
    Record,
    Recovered,
    RunBegun,
    RunStopped,
)
from swarm.server.journal.schema import connect, prepare
from swarm.server.journal.store import load, write
from swarm.tokens import TrainBatch, TrainGroup
from tests.swarm.server.journal.build import call, claimed, ended, ended_with, refused, step
from tests.swarm.server.journal.model import Reference

EPISODES = st.integers(0, 11).map("e{}".format)
SMALL = st.integers(0, 2)
KINDS = ["claim"] * 4 + ["end"] * 4 + ["call"] * 2 + ["take", "step"] * 2 + ["other"]


@st.composite
def histories(draw: st.DrawFn) -> list[list[Record]]:
    """Records in commits: few names, so that every record comes too early, too late and repeatedly."""
    reference = Reference()
    taken = 0

    def one() -> Record:
        nonlocal taken
        uuid, small = draw(EPISODES), draw(SMALL)
        kind = draw(st.sampled_from(KINDS))
        running = [name for name, episode in reference.episodes.items() if episode.state == "claimed"]
        if kind in ("end", "call") and running and small:
            uuid = draw(st.sampled_from(running))
        number = int(uuid[1:])
        if kind == "claim":
            eval_type = "eval" if number == 11 else "train"
            # episodes 8 to 10 are claimed under one key, as a group
            key = "g" if 8 <= number < 11 else f"k{number}" if number % 2 else ""
            return claimed(uuid, episode_type=eval_type, claim_key=key, group_uuid="group" if key == "g" else "")
        if kind == "call":
            return call(uuid, f"call-{small}")
        if kind == "end":
            if number == 11 or draw(st.integers(0, 3)) == 0:
                how = draw(st.sampled_from(["ended", "aborted", "idle", "capped", "engine"]))
                return refused(uuid) if how == "ended" else EpisodeEnded(uuid, "c", how, 1.7e9)
            calls = reference.episodes[uuid].calls if uuid in reference.episodes else []
            if calls and small:
                return ended_with(CallRecorded(uuid, calls[0]), f"t{number % 3}")
            return ended(uuid, task_id=f"t{number % 3}")
        waiting = reference.those("waiting")
        if kind == "take" and waiting and reference.batch is None:
            taken += 1
            members: dict[str, list[str]] = {}
            for name in waiting[draw(st.integers(0, len(waiting) // 2)) :]:
                members.setdefault(f"t{int(name[1:]) % 3}", []).append(name)
            ends = {name: reference.episodes[name].end for name in waiting}
            groups = [
                TrainGroup(task_id=task, trajectories=[end.trajectory for name in names if (end := ends[name])])
                for task, names in members.items()
            ]
            return BatchTaken(TrainBatch(batch_id=f"b{taken}", groups=groups))
        if kind == "step":
            return step(f"b{draw(st.integers(max(0, taken - 1), taken))}", taken)
        return draw(
            st.sampled_from(
                [
                    EpisodeKeyAdded(uuid, bytes([small])),
                    EpisodeQuarantined(uuid, f"reason {small}"),
                    EpisodesDropped([uuid, "e0", "never"], "stale"),
                    GroupLosses(f"t{number % 3}", small, taken),
                    ClientAgreed(f"c{small}"),
                    AgreementsEnded(),
                    BatchFailed(f"b{taken}", small + 1),
                    RunBegun(f"r{taken // 2}", f"job {small}"),
                    RunStopped(f"r{taken // 2}"),
                ]
            )
        )

    commits: list[list[Record]] = []
    said: list[Record] = [claimed(f"e{number}") for number in range(draw(st.sampled_from([0, 6])))]
    for record in said:
        reference.apply(record)
    if said:
        commits.append(list(said))
    for size in draw(st.lists(st.integers(1, 12), min_size=1, max_size=10)):
        commit: list[Record] = []
        for _ in range(size):
            repeat = said and draw(st.integers(0, 6)) == 0
            record = draw(st.sampled_from(said)) if repeat else one()
            if isinstance(record, BatchTaken) and repeat:
                continue  # said again only while it is out: see the test of its own
            reference.apply(record)
            said.append(record)
            commit.append(record)
        commits.append(commit)
    return commits


def test_a_claim_repeated_after_a_restart_does_not_open_an_episode_again(tmp_path: Path) -> None:
    connection = prepare(tmp_path / "journal.db")
    over = EpisodeEnded("e0", "c", "ended", 1.6e9, drop_reason="no call")
    for _ in range(2):
        ledger = load(connection)
        with connection:
            write(connection, ledger.fold([claimed("e0"), over]))
    assert (recover(connection).dropped, ledger.live) == (1, {})
    connection.close()


@settings(max_examples=150)
@given(commits=histories(), cut=st.floats(0, 1), reopen=st.integers(0, 12))
def test_a_journal_cut_anywhere_is_a_prefix(commits: list[list[Record]], cut: float, reopen: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        connection = prepare(path)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        ledger = load(connection)
        wal = path.with_name("journal.db-wal")
        reference = Reference()
        states: list[tuple[int, Recovered]] = [(wal.stat().st_size, reference.recovered())]
        for number, records in enumerate(commits):
            if number == reopen:
                # what a restarted server makes of the file serves as well as what the first one had in memory
                ledger = load(connection)
            connection.execute("BEGIN IMMEDIATE")
            changes = ledger.fold(records)
            for _ in range(1 + number % 2):  # a commit that failed late may be on disk already when it is tried again
                write(connection, changes)
            connection.execute("COMMIT")
            for record in records:
                reference.apply(record)
            states.append((wal.stat().st_size, reference.recovered()))
            assert recover(connection) == states[-1][1]
        size = states[-1][0]
        dead = Path(folder) / "dead.db"
        shutil.copy(path, dead)
        length = states[0][0] + int(cut * (size - states[0][0]))
        dead.with_name("dead.db-wal").write_bytes(wal.read_bytes()[:length])
        connection.close()
        survivor = connect(dead)
        try:
            assert recover(survivor) == [state for end, state in states if end <= length][-1]
        finally:
            survivor.close()
