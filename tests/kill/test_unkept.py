"""What may not be kept is nowhere on disk and in no batch, whatever is cut, repeated or killed.

150 requests and 2 kills; ``python -m tests.kill --unkept 10000 --kills 20`` for more, with a report.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kill.unkept import CALLERS, VICTIMS, Storm
from tests.standins.spelling import TRAINED


@pytest.mark.slow
def test_what_may_not_be_kept_is_nowhere(tmp_path: Path) -> None:
    storm = Storm(tmp_path, random.randrange(2**32))
    storm.run(requests=150, kills=2)
    report = storm.summary()
    assert storm.found == [], report
    # it was a test: all of them asked, both were killed, and what may be kept is found
    assert storm.asked.keys() == CALLERS.keys() and storm.kills.keys() == VICTIMS.keys(), report
    assert storm.controls.keys() >= {"text", "int32"} and report["private_answers_given_back"], report
    assert storm.rows[TRAINED] and storm.rows["masked"] and not storm.rows["others"], report
    assert storm.answers["200"] > 100 and storm.answers["left"], report
