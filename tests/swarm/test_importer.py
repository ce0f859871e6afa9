"""User code loads by name or path, and every way to get it wrong has its own message."""

from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.importer import load_attribute, load_file


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


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "hook.py"
    path.write_text("answer = 42\n")
    assert load_file(path).answer == 42


def test_two_files_of_one_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    values: list[int] = []
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "hook.py").write_text(f"answer = {n}\n")
    values = [load_file(tmp_path / str(n) / "hook.py").answer for n in (1, 2)]
    assert values == [1, 2]


@pytest.mark.parametrize(
    ("source", "message"),
    [("def f(:\n", "line 1"), ("x = 1\nraise ValueError('no')\n", "failed on import: ValueError: no")],
)
def test_bad_file(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "hook.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_file(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_file(tmp_path / "nope.py")
