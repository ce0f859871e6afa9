"""What a process imports of synced code, and what of that is told as wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.code_snapshots.manifest import digest_of, manifest_of
from swarm.importer import python_path
from swarm.link.imported import ABOUT, ImportedCode, differences, imported, top_level

ASK = (
    "import sys, json; from pathlib import Path; from swarm.link.imported import imported; "
    "print(json.dumps(imported(sys.argv[1:], Path.cwd()).locations))"
)


def differing(code: Path, processes: dict[str, dict[str, str]]) -> str:
    digest = digest_of(manifest_of(code))
    return differences(code, digest, {who: ImportedCode(str(code), there, digest) for who, there in processes.items()})


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def ask(names: list[str], cwd: Path, *first: Path) -> dict[str, str]:
    """The answer of a Python child that starts as the engine does."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        cwd=cwd,
        env={"PYTHONSAFEPATH": "1", "PYTHONPATH": python_path(*first)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_what_counts_as_code(tmp_path: Path) -> None:
    code = write(tmp_path, "one.py", "pkg/__init__.py", "space/deep/a.py", "data/x.json", "__main__.py", "a-b/c.py")
    assert top_level(code) == ["one", "pkg", "space"]


def test_a_process_tells_what_it_imports_and_a_checkout_is_not_it(tmp_path: Path) -> None:
    code = write(tmp_path / "code", "one.py", "pkg/__init__.py", "space/deep/a.py")
    checkout = write(tmp_path / "checkout", "one.py", "pkg/__init__.py", "swarm/__init__.py")
    names = ["one", "pkg", "space"]
    locations = ask(names, checkout, code)
    assert locations == {
        "one": str(code / "one.py"),
        "pkg": str(code / "pkg/__init__.py"),
        "space": str(code / "space"),
    }
    assert differing(code, {"the driver": locations}) == ""
    other = write(tmp_path / "other", "one.py", "pkg/__init__.py")
    wrong = ask(names, tmp_path, other)
    assert differing(code, {"the driver": locations, "a Ray worker": wrong}) == (
        f"a Ray worker imports one from {other}/one.py; a Ray worker imports pkg from {other}/pkg/__init__.py; "
        "a Ray worker imports space from nowhere"
    )


def test_our_own_packages_can_be_synced(tmp_path: Path) -> None:
    code = write(tmp_path, "gateway/__init__.py", "reward_hooks/__init__.py")
    assert differing(code, {"the driver": ask(["gateway", "reward_hooks"], tmp_path, code)}) == ""


@pytest.mark.parametrize(("file", "wrong"), [("states.py", True), ("train.py", False)])
def test_a_folder_without_init_must_not_be_a_part_of_an_installed_package(
    tmp_path: Path, file: str, wrong: bool
) -> None:
    code = write(tmp_path, f"swarm/{file}")
    assert bool(differing(code, {"the driver": imported(["swarm"], code).locations})) is wrong


def test_a_name_that_was_not_told_is_wrong(tmp_path: Path) -> None:
    assert "one from nowhere" in differing(write(tmp_path, "one.py"), {"the driver": {}})


def test_files_that_are_not_as_they_were_synced_are_told(tmp_path: Path) -> None:
    code = write(tmp_path / "files", "one.py", "data.txt")
    manifest = manifest_of(code)
    (tmp_path / ABOUT).write_text(json.dumps({"files": manifest}))
    # bytecode, and what a run writes beside the code, was not synced
    write(code, "__pycache__/one.cpython-311.pyc", "output/log.txt")
    same = imported([], code)
    assert same.digest == digest_of(manifest)
    (code / "data.txt").write_text("changed")
    processes = {"the driver": same, "a Ray worker": imported([], code)}
    for process, told in processes.items():
        processes[process] = ImportedCode(told.folder, {"one": str(code / "one.py"), "output": str(code)}, told.digest)
    said = differences(code, digest_of(manifest), processes)
    assert said == "a Ray worker read other files there than were synced: send them again (`code sync --force-restart`)"
