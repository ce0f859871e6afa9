from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from adapters.models.cache import Manifest, install, record_files, staging

ROOT = Path(__file__).parents[2]
# the tutorials import their shared `study` package from there
sys.path.append(str(ROOT / "tutorial"))


@pytest.fixture
def model_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """smollm2-135m in the cache, and the stand-in engine for the servers that are started."""
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path / "home"))
    with staging() as workspace:
        built = workspace / "model"
        built.mkdir()
        (built / "config.json").write_text("{}")
        files = record_files(built, lambda *_: None)
        install(built, Manifest(name="smollm2-135m", source="PyPI test", licence="Apache-2.0", files=files))
    paths = [str(Path(__file__).parent / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
