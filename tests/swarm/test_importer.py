"""User code loads by name or path, and every way to get it wrong has its own message."""

import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from swarm.errors import ConfigError
from swarm.importer import SourceFolder, code_of, load_attribute, own_code


def test_attribute() -> None:
    assert load_attribute("pathlib:Path.cwd")() == Path.cwd()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pathlib", "must have the form"),
        (":x", "must have the form"),
        ("no_such_module_here:x", "cannot import 'no_such_module_here'"),
        ("pathlib:Nope", "has no attribute 'Nope'"),
    ],
)
def test_bad_attribute(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_attribute(spec)


def test_two_files_of_one_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "hook.py").write_text(f"answer = {n}\n")
    assert [SourceFolder(tmp_path / str(n)).module("hook").answer for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    ("source", "message"),
    [("def f(:\n", "line 1"), ("x = 1\nraise ValueError('no')\n", "failed on import: ValueError: no")],
)
def test_bad_file(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "hook.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        SourceFolder(tmp_path).module("hook")


def test_classes_of_a_file_pickle_and_say_their_types(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from pydantic import BaseModel\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "class Shape(BaseModel):\n    points: list[Point]\n"
    )
    shapes = SourceFolder(tmp_path).module("shapes")
    shape = shapes.Shape(points=[{"x": 1}])
    assert pickle.loads(pickle.dumps(shape)) == shape
    assert get_type_hints(shapes.Point) == {"x": int}


def test_a_digest_says_which_files_were_loaded(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import json\nfrom prompt import TEXT\n")
    (tmp_path / "prompt.py").write_text("TEXT = 'Be brief.'\n")

    def code() -> str:
        folder = SourceFolder(tmp_path)
        folder.module("agent")
        return folder.code

    first = code()
    assert len(first) == 16 and code() == first
    (tmp_path / "prompt.py").write_text("TEXT = 'Be short.'\n")
    assert code() != first
    assert code_of([]) == code_of([itertools]) == "", "there is no file"
    assert code_of([json, json]) == code_of([json]) != ""


def test_our_own_code_is_what_is_neither_installed_nor_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_code()
    assert before == own_code()
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules[__name__])
    assert own_code() == before, "the same under another name, as in a process that multiprocessing spawned"
    (tmp_path / "agent.py").write_text("x = 1\n")
    folder = SourceFolder(tmp_path)
    folder.module("agent")
    changed = own_code()
    assert changed != before
    (tmp_path / "agent.py").write_text("x = 2\n")
    assert own_code() == changed, "what runs is still the old one"
    folder.forget()
