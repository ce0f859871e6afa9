"""Packing a folder: equal files give equal bytes, and what does not belong stays out."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.sync import ArchiveLimits, build_archive, check_and_extract


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    for name, text in {
        "agent.py": "print(1)",
        "pkg/__init__.py": "",
        "pkg/tool.sh": "#!/bin/sh",
        ".git/config": "secret",
        "pkg/__pycache__/x.cpython-311.pyc": "",
        "env/pyvenv.cfg": "",
        "env/lib/big.py": "",
        "pkg/old.pyc": "",
        ".env": "KEY=1",
        "data/raw/rows.jsonl": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pkg/tool.sh").chmod(0o755)
    return folder


def names(archive: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        return reader.namelist()


def test_what_is_packed(code: Path) -> None:
    assert names(build_archive(code)) == ["agent.py", "data/raw/rows.jsonl", "pkg/__init__.py", "pkg/tool.sh"]
    assert names(build_archive(code, exclude=["data/raw", "*.sh"])) == ["agent.py", "pkg/__init__.py"]


def test_equal_files_are_equal_bytes(code: Path, tmp_path: Path) -> None:
    first = build_archive(code)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in sorted(code.rglob("*"), reverse=True):
        if path.is_file():
            other = copy / path.relative_to(code)
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_bytes(path.read_bytes())
            other.chmod(path.stat().st_mode)
            os.utime(other, (10, 10))
    assert build_archive(copy) == first
    (copy / "agent.py").write_text("print(2)")
    assert build_archive(copy) != first


def test_there_and_back(code: Path, tmp_path: Path) -> None:
    there = check_and_extract(build_archive(code), tmp_path / "target")
    assert (there / "agent.py").read_text() == "print(1)"
    assert os.access(there / "pkg/tool.sh", os.X_OK)
    assert not os.access(there / "agent.py", os.X_OK)
    assert [path.name for path in (tmp_path / "target").iterdir()] == [there.name]


def test_links(code: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "outside.py").write_text("secret")
    (code / "inner.py").symlink_to("agent.py")
    (code / "out.py").symlink_to(tmp_path / "outside.py")
    (code / "gone.py").symlink_to("nowhere")
    (code / "loop").symlink_to(".")
    os.mkfifo(code / "pipe")
    packed = build_archive(code)
    assert "inner.py" in names(packed)
    assert not {"out.py", "gone.py", "loop", "pipe"} & {name.split("/")[0] for name in names(packed)}
    with zipfile.ZipFile(io.BytesIO(packed)) as reader:
        assert reader.read("inner.py") == b"print(1)"
    assert all(f"{name} is left out" in caplog.text for name in ("out.py", "gone.py", "loop", "pipe"))


def test_big_files_stay_out(code: Path, caplog: pytest.LogCaptureFixture) -> None:
    (code / "weights.bin").write_bytes(b"x" * 5000)
    assert "weights.bin" not in names(build_archive(code, limits=ArchiveLimits(max_file_bytes=4096)))
    assert "weights.bin is left out: it has 5000 bytes, more than 4096" in caplog.text


def test_what_cannot_be_packed_is_said(code: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        build_archive(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no files"):
        build_archive(tmp_path / "empty")
    with pytest.raises(ConfigError, match="4 files, at most 3"):
        build_archive(code, limits=ArchiveLimits(max_files=3))
    (code / "largest.py").write_bytes(os.urandom(3000))
    with pytest.raises(ConfigError, match=r"3\d+ bytes, at most 1024.*largest.py \(3000 bytes\)"):
        build_archive(code, limits=ArchiveLimits(max_total_bytes=1024))
    with pytest.raises(ConfigError, match="packed they are"):
        build_archive(code, limits=ArchiveLimits(max_archive_bytes=1024))
    (code / "a:b.py").write_text("")
    with pytest.raises(ConfigError, match=r"a:b\.py.*colon"):
        build_archive(code)


def test_zeros_are_no_code(code: Path) -> None:
    (code / "zeros.py").write_bytes(bytes(3 * 1024 * 1024))
    with pytest.raises(ConfigError, match=r"zeros\.py"):
        build_archive(code)
    (code / "zeros.py").unlink()
    for n in range(8):
        (code / f"zeros{n}.py").write_bytes(bytes(1024 * 1024))
    with pytest.raises(ConfigError, match="200:1"):
        build_archive(code)
