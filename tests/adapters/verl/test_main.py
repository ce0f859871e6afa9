"""Started where the engine is not installed, the driver says so in one line."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_light_install_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("raise ModuleNotFoundError('no hydra', name='hydra')\n")
    code = (
        f"import runpy, sys; sys.path[:0] = [{str(tmp_path)!r}]; runpy.run_module('adapters.verl', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("engine: this install cannot train, for hydra")
    assert "Traceback" not in done.stderr
