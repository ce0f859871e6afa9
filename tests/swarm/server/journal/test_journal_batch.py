"""Records of one decision are appended at once."""

from __future__ import annotations

import pytest

from swarm.server.journal.journal_batch import Together
from swarm.server.journal.records import ClientAgreed, Record


def test_what_is_held_goes_together_whatever_happens() -> None:
    calls: list[tuple[Record, ...]] = []
    together = Together(lambda *records: calls.append(records))
    one, two, three, four = (ClientAgreed(name) for name in "1234")
    together(one)
    with together.hold():
        together(two)
        with together.hold():
            together(three, four)
        assert calls == [(one,)]
    assert calls == [(one,), (two, three, four)]
    with pytest.raises(ZeroDivisionError), together.hold():
        together(one)
        raise ZeroDivisionError
    with together.hold():
        pass
    together(two)
    assert calls[2:] == [(one,), (two,)]
