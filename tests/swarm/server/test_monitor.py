"""What a monitor shows: the pushed lines."""

from swarm.server.monitor import MAX_LINES, MAX_MESSAGE, VerboseLog


def test_lines_expire_and_are_bounded() -> None:
    now = 100.0
    log = VerboseLog(lambda: now)
    log.push("a", "first")
    now = 129.0
    log.push("b", "x" * 9999)
    assert [entry.message[:5] for entry in log.entries()] == ["first", "xxxxx"]
    now = 131.0
    (entry,) = log.entries()
    assert (entry.tag, len(entry.message), entry.timestamp) == ("b", MAX_MESSAGE, 129.0)
    for n in range(3 * MAX_LINES):
        log.push("", str(n))
    assert [e.message for e in log.entries()] == [str(n) for n in range(2 * MAX_LINES, 3 * MAX_LINES)]
    now = 200.0
    assert log.entries() == []
