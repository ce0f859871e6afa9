"""What is stored comes back, and a machine that dies anywhere leaves a prefix of the commits."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.server.journal.recovery import recover
from swarm.server.journal.rows import (
    AgreementRow,
    BatchRow,
    CountsRow,
    Ending,
    GroupRow,
    JournalRow,
    KeyRow,
    NoAgreementsRow,
    QuarantineRow,
    Recovered,
    RecoveredEpisode,
    RunRow,
)
from swarm.server.journal.schema import open_to_write
from swarm.server.journal.sqlite import write
from tests.swarm.server.journal.build import (
    batch,
    call,
    claimed,
    dropped,
    ended,
    ended_with,
    over,
    refused,
    stepped,
    taken,
    trajectory,
)

NAMES = [f"e{number}" for number in range(8)]


@pytest.mark.parametrize("commits", [1, 100], ids=["one commit", "a commit each"])
def test_every_row_comes_back(tmp_path: Path, commits: int) -> None:
    out, done = batch("b2", t=["e2", "e3"]), batch("b1", t=["e0", "e1"])
    running = claimed("running", claim_key="k", run_id="r")
    kept = ended_with(call("e4", "call-e4"))
    rows: list[JournalRow] = [
        RunRow("old", "before", stopped=True),
        RunRow("r", "job"),
        *(claimed(name) for name in (*NAMES, "gone")),
        running,
        call("running", "1"),
        call("running", "2"),
        KeyRow("running", b"2"),
        KeyRow("running", b"1"),
        QuarantineRow("running", "why"),
        call("e4", "call-e4"),
        call("e4", "one that came to nothing"),
        KeyRow("e4", b"3"),
        *(ended(name) for name in NAMES[:4]),
        kept,
        ended("e5"),
        refused("e6"),
        *taken(done),
        *stepped(done, 7),
        AgreementRow("forgotten"),
        GroupRow("gone", 2, 1),
        *taken(out),
        NoAgreementsRow(),
        dropped("e5"),
        BatchRow(out, attempts=2),
        AgreementRow("me"),
        GroupRow("t", 1, 3),
        GroupRow("gone", 0, 1),
        over("gone", "idle"),
        CountsRow("r", 2, 2, 1),
        RunRow("r", "job", stopped=True),
    ]
    connection = open_to_write(tmp_path / "journal.db")
    for part in [rows] if commits == 1 else [[row] for row in rows]:
        for _ in range(2):  # a commit that failed late may be on disk already when it is tried again
            write(connection, part)
    found = recover(connection)
    calls = (call("running", "1").call, call("running", "2").call)
    assert [one for one in found.claimed if one.claim.episode_uuid == "running"] == [
        RecoveredEpisode(running, (b"k" * 32, b"2", b"1"), calls, "why")
    ]
    assert found.finished == [("c", kept.trajectory)]
    assert found.outstanding == BatchRow(out, 2)
    assert (found.run_id, found.job_yaml, found.stopped) == ("r", "job", True)
    assert (found.losses, found.agreed) == ([GroupRow("t", 1, 3)], ["me"])
    assert (found.trained, found.dropped, found.quarantined) == (2, 2, 1)
    assert [one.step for one in found.steps] == [7]
    assert found.claims == {("c", "k"): ["running"]}
    assert found.endings.keys() == {*NAMES[:7], "gone"}
    keys = (claimed("e6").key_digest,)
    assert found.endings["e6"] == Ending("c", "ended", "no call", keys=keys)
    assert found.endings["e5"] == Ending("c", "ended", "", "end-e5", keys=keys), "what its client was told stays"
    assert connection.execute("SELECT call_id FROM calls WHERE episode = 'e4'").fetchall() == [("call-e4",)]
    assert connection.execute("SELECT count(*) FROM keys WHERE episode = 'e4'").fetchone() == (0,)
    connection.close()


ROWS = st.one_of(
    st.sampled_from(NAMES).map(claimed),
    st.sampled_from(NAMES).map(ended),
    st.builds(call, st.sampled_from(NAMES), st.sampled_from("12")),
    st.sampled_from(NAMES).map(dropped),
    st.sampled_from([RunRow("r", "job"), CountsRow("r", 1, 0, 0), AgreementRow("me"), NoAgreementsRow()]),
)


@settings(max_examples=60, deadline=None)
@given(commits=st.lists(st.lists(ROWS, min_size=1, max_size=6), min_size=1, max_size=8), cut=st.floats(0, 1))
def test_a_journal_cut_anywhere_is_a_prefix_of_its_commits(commits: list[list[JournalRow]], cut: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        connection = open_to_write(path)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        log = path.with_name("journal.db-wal")
        states: list[tuple[int, Recovered]] = [(log.stat().st_size, recover(connection))]
        for rows in commits:
            connection.execute("BEGIN IMMEDIATE")
            write(connection, rows)
            connection.execute("COMMIT")
            states.append((log.stat().st_size, recover(connection)))
        dead = Path(folder) / "dead.db"
        shutil.copy(path, dead)
        length = states[0][0] + int(cut * (states[-1][0] - states[0][0]))
        dead.with_name("dead.db-wal").write_bytes(log.read_bytes()[:length])
        connection.close()
        survivor = open_to_write(dead)
        try:
            assert recover(survivor) == [state for end, state in states if end <= length][-1]
        finally:
            survivor.close()


def test_past_claims(tmp_path: Path) -> None:
    connection = open_to_write(tmp_path / "journal.db")
    rows = [
        claimed("a", claim_key="k"),
        claimed("b", client="d", claim_key="k"),
        claimed("g1", claim_key="g", group_uuid="G"),
        claimed("g2", claim_key="g", group_uuid="G"),
        # nobody waited for it any more, so the key was forgotten and used again
        claimed("o", claim_key="twice"),
        over("o", "engine"),
        claimed("n", claim_key="twice"),
    ]
    write(connection, rows)
    assert recover(connection).claims == {
        ("c", "k"): ["a"],
        ("d", "k"): ["b"],
        ("c", "g"): ["g1", "g2"],
        ("c", "twice"): ["n"],
    }
    connection.close()


def test_any_name_that_a_body_can_carry_is_stored(tmp_path: Path) -> None:
    connection = open_to_write(tmp_path / "journal.db")
    write(connection, [claimed("a", client="\ud800"), ended("a", task_id="\udfff\0")])
    assert recover(connection).finished == [("?", trajectory("a", "\udfff\0"))]
    connection.close()
