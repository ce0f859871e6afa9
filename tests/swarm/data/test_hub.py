"""Hugging Face datasets as tasks; the library's place is taken by a stand-in but for one test with a local folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swarm.data import hub, read_tasks
from swarm.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the library was asked for; it gives two rows and breaks."""
    calls: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        calls.append((name, config, split, streaming))
        yield {"question": "1+1?", "answer": "2"}
        yield {"question": "2+2?", "answer": "4"}
        raise ConnectionError("the hub is\nnot reachable")

    monkeypatch.setattr(hub, "_load_dataset", lambda source: load)
    return calls


@pytest.mark.parametrize(
    ("source", "name", "config", "split"),
    [
        ("hf:openai/gsm8k", "openai/gsm8k", None, "train"),
        ("hf:openai/gsm8k:test", "openai/gsm8k", None, "test"),
        ("hf:openai/gsm8k@main:test[:10%]", "openai/gsm8k", "main", "test[:10%]"),
    ],
)
def test_rows_are_streamed_as_tasks(
    asked: list[tuple[Any, ...]], source: str, name: str, config: str | None, split: str
) -> None:
    tasks = read_tasks(source)
    assert asked == []
    assert [next(tasks).main_query, next(tasks).main_query] == ["1+1?", "2+2?"]
    assert asked == [(name, config, split, True)]
    with pytest.raises(ConfigError, match=r"after row 2: ConnectionError: the hub is not reachable; .*\.jsonl"):
        next(tasks)


def test_a_dataset_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="names no dataset"):
        read_tasks("hf::train")


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        read_tasks("hf:openai/gsm8k")


def test_the_library_is_not_loaded_before_it_is_needed() -> None:
    probe = "import sys, swarm.data; print('datasets' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("datasets") is None, reason="`datasets` is not installed")
def test_the_real_library_reads_a_folder(tmp_path: Path) -> None:
    """In a process of its own: the library warns and starts threads as it likes."""
    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = (
        "import sys; from swarm.data import read_tasks\n"
        "print([task.main_query for task in read_tasks('hf:' + sys.argv[1])])\n"
        "from swarm.errors import ConfigError\n"
        "try: list(read_tasks('hf:' + sys.argv[1] + ':nosuch'))\n"
        "except ConfigError as exc: print(exc)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['0?', '1?', '2?']\n")
    assert "nosuch" in done.stdout
