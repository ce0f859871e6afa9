"""Patches: what they may change, and every way in which one tried to change the evaluator."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from swarm.errors import ConfigError
from swarm.research import trees
from swarm.research.study import Study, read_study
from tests.swarm.research.making import EVALUATE, folder_of, study_of


class Begun(NamedTuple):
    study: Study
    folder: Path
    base: trees.Tree
    locked: str

    def patched(self, patch: str) -> Path:
        digest = trees.patched(self.study, self.folder, self.base.digest, patch)
        return trees.kept(self.folder, digest, "run/e1").folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = folder_of(tmp_path_factory.mktemp("patches") / "study")
    study = read_study(folder)
    digest, locked, _ = trees.snapshot(study, folder)
    return Begun(study, folder, trees.kept(folder, digest, "base"), locked)


def edit(name: str) -> str:
    """Makes the first of the held-out tasks another one."""
    lines = [json.dumps({"question": f"held_out {n}"}) for n in range(4)]
    after = "".join(f" {line}\n" for line in lines[1:])
    return f'--- a/{name}\n+++ b/{name}\n@@ -1,4 +1,4 @@\n-{lines[0]}\n+{{"question": "easy"}}\n{after}'


def new(name: str, text: str, mode: str = "100644") -> str:
    head = f"diff --git a/{name} b/{name}\nnew file mode {mode}\n--- /dev/null\n+++ b/{name}\n"
    end = "\n\\ No newline at end of file" if mode == "120000" else ""
    return f"{head}@@ -0,0 +1 @@\n+{text}{end}\n"


WEIGHT = "--- a/agent.py\n+++ b/agent.py\n@@ -3,3 +3,3 @@\n \n-WEIGHT = 1\n+WEIGHT = 2\n \n"
_LINES = EVALUATE.splitlines()
REMOVAL = (
    "diff --git a/evaluate.py b/evaluate.py\ndeleted file mode 100644\n--- a/evaluate.py\n+++ /dev/null\n"
    + f"@@ -1,{len(_LINES)} +0,0 @@\n"
    + "".join(f"-{line}\n" for line in _LINES)
)


def test_a_patch_may_lack_its_last_newline(begun: Begun) -> None:
    # models and commands trim what they answer
    tree = begun.patched(WEIGHT.removesuffix("\n"))
    assert "WEIGHT = 2" in (tree / "agent.py").read_text()


def test_a_patch_changes_declared_files(begun: Begun) -> None:
    tree = begun.patched(WEIGHT + new("more/tool.py", "TOOL = 1"))
    assert "WEIGHT = 2" in (tree / "agent.py").read_text() and (tree / "more" / "tool.py").exists()
    assert (tree / "evaluate.py").read_bytes() == (begun.folder / "evaluate.py").read_bytes()
    assert "WEIGHT = 1" in (begun.base.folder / "agent.py").read_text()


def test_paths_may_be_written_in_any_way(begun: Begun) -> None:
    study = study_of(locked=["./evaluate.py", "held_out.jsonl"], patch_paths=["./agent.py"])
    assert trees.snapshot(study, begun.folder)[0] == begun.base.digest
    assert "WEIGHT = 2" in (begun._replace(study=study).patched(WEIGHT) / "agent.py").read_text()
    with pytest.raises(trees.RefusedError, match=r"it changes evaluate\.py"):
        begun._replace(study=study).patched(REMOVAL)


RENAME = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
MODE = "diff --git a/{0} b/{0}\nold mode 100644\nnew mode {1}\n"
TRIES = {
    "an edit": edit("held_out.jsonl"),
    "a traversal out and back": edit("more/../held_out.jsonl"),
    "a traversal from a declared folder": edit("more/../more/../held_out.jsonl"),
    "a traversal out": new("../evaluate.py", "x = 1"),
    "an absolute path": new("/tmp/evaluate.py", "x = 1"),
    "a rename onto it": RENAME.format("agent.py", "evaluate.py"),
    "a rename away": RENAME.format("evaluate.py", "more/evaluate.py"),
    "a copy onto it": RENAME.format("agent.py", "evaluate.py").replace("rename", "copy"),
    "a rename of a file that is not declared": RENAME.format("train.jsonl", "more/train.jsonl"),
    "a mode": MODE.format("evaluate.py", "100755"),
    "a mode of a declared file": MODE.format("agent.py", "100755"),
    "a link in its place": REMOVAL + new("evaluate.py", "agent.py", "120000"),
    "a link to it": new("more/link", "../evaluate.py", "120000"),
    "a file behind a link": new("more/here", "..", "120000") + new("more/here/evaluate.py", "x = 1"),
    "a link out": new("more/out", "/tmp", "120000"),
    "a submodule": new("more/sub", "Subproject commit " + "a" * 40, "160000"),
    "a package of its name": new("evaluate/__init__.py", "x = 1"),
    "a new declaration": new("study.yaml", "question: x"),
    "a declaration in a declared folder": new("more/study.yaml", "question: x"),
    "git's own folder": new(".git/hooks/post-checkout", "#!/bin/sh", "100755"),
    "attributes": new(".gitattributes", "* filter=x"),
    "bytecode": new("__pycache__/evaluate.cpython-311.pyc", "x"),
    "bytecode in a declared folder": new("more/__pycache__/x.pyc", "x"),
    "an executable": new("more/x.sh", "#!/bin/sh", "100755"),
    "a deletion": REMOVAL,
    "nothing": "",
    "no patch": "please change the evaluator",
}


@pytest.mark.parametrize("name", TRIES)
def test_the_evaluator_cannot_be_changed(begun: Begun, name: str) -> None:
    with pytest.raises(trees.RefusedError) as refused:
        begun.patched(TRIES[name])
    assert "does not apply" not in refused.value.message, "it was tried in earnest"
    assert (trees.kept(begun.folder, begun.base.digest, "evaluator/x").folder / "evaluate.py").read_bytes() == (
        begun.folder / "evaluate.py"
    ).read_bytes()
    trees.check_locked(begun.study, begun.folder, begun.locked)
    assert not os.path.exists("/tmp/evaluate.py")
    assert not list((begun.folder / "runs").glob("patch-*"))


def test_a_study_without_patch_paths_takes_none(begun: Begun) -> None:
    with pytest.raises(trees.RefusedError, match="allows no patches"):
        trees.patched(study_of(patch_paths=[]), begun.folder, begun.base.digest, WEIGHT)


@pytest.mark.parametrize("name", ["evaluate.py", "held_out.jsonl", "study.yaml"])
def test_a_changed_evaluator_is_noticed_on_disk(begun: Begun, name: str) -> None:
    before = (begun.folder / name).read_bytes()
    try:
        (begun.folder / name).write_bytes(before + (b"\nseed: 7\n" if name == "study.yaml" else b"\n# easier\n"))
        with pytest.raises(ConfigError, match="is not the one that the study began with"):
            trees.check_locked(begun.study, begun.folder, begun.locked)
    finally:
        (begun.folder / name).write_bytes(before)
    (begun.folder / "agent.py").touch()
    trees.check_locked(begun.study, begun.folder, begun.locked)


def test_kept_code_that_was_changed_is_noticed(begun: Begun) -> None:
    archive = begun.folder / "runs" / "code" / f"{begun.base.digest}.zip"
    before = archive.read_bytes()
    other = trees.patched(begun.study, begun.folder, begun.base.digest, WEIGHT)
    try:
        archive.write_bytes((archive.parent / f"{other}.zip").read_bytes())
        with pytest.raises(ConfigError, match="was changed"):
            trees.kept(begun.folder, begun.base.digest, "evaluator/x")
        archive.unlink()
        with pytest.raises(ConfigError, match="is gone"):
            trees.kept(begun.folder, begun.base.digest, "evaluator/x")
    finally:
        archive.write_bytes(before)


def test_a_package_for_the_engine_must_be_there(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study", sync_packages=["agent", "agnet"])
    with pytest.raises(ConfigError, match="sync_packages: git tracks no package 'agnet'"):
        trees.snapshot(read_study(folder), folder)


def test_locked_files_must_be_tracked(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "study")
    subprocess.run(["git", "-C", str(folder), "rm", "--quiet", "--cached", "held_out.jsonl"], check=True)
    with pytest.raises(ConfigError, match=r"held_out.jsonl is locked, but git does not track it"):
        trees.snapshot(read_study(folder), folder)
