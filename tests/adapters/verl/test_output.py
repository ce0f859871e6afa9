"""What a process prints whose log is on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
PRINTS = """
import sys
from adapters.verl.output import spare_output
if sys.argv[1] == "spared":
    spare_output()
print("a step is done", flush=True)
print("a warning", file=sys.stderr, flush=True)
sys.exit(7)
"""


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("mode", "code"), [("spared", 7), ("plain", 1)])
def test_a_full_disk_loses_output_and_ends_nothing(mode: str, code: int) -> None:
    with FULL.open("wb") as full:
        done = subprocess.run([sys.executable, "-c", PRINTS, mode], stdout=full, stderr=full)
    assert done.returncode == code


def test_what_can_be_written_is(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS, "spared"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a step is done\n", "a warning\n")
