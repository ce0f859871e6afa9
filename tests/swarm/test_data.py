"""Task readers: columns, ids, laziness, and errors that name file and line."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data import SHUFFLE_TASKS, epochs_of, read_tasks, shuffled, task_of
from swarm.errors import ConfigError

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]


def write_jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "query", "messages", "metadata"),
    [
        *(({name: "why?", "n": 42}, "why?", [], {"n": 42}) for name in ("question", "prompt", "main_query", "query")),
        *(({name: CHAT}, "why?", CHAT, {}) for name in ("messages", "init_messages", "prompt")),
        ({"question": "short", "messages": CHAT}, "short", CHAT, {}),
        ({"question": "q", "level": 1, "metadata": {"level": 2}}, "q", [], {"level": 2}),
    ],
)
def test_columns_become_query_messages_and_metadata(
    tmp_path: Path, row: dict[str, Any], query: str, messages: list[Any], metadata: dict[str, Any]
) -> None:
    [task] = read_tasks(write_jsonl(tmp_path, row))
    assert (task.main_query, task.init_messages, task.metadata) == (query, messages, metadata)


def test_an_id_is_given_or_a_hash_of_the_row() -> None:
    assert task_of({"question": "q", "task_id": "t-1"}, "here").task_id == "t-1"
    assert task_of({"question": "q", "id": 7}, "here").task_id == "7"
    one, same, other, empty = (
        task_of(row, "here").task_id
        for row in (
            {"question": "q", "answer": 1},
            {"answer": 1, "question": "q"},
            {"question": "q", "answer": 2},
            {"question": "q", "answer": 1, "task_id": None},
        )
    )
    assert one == same == empty != other
    assert len(one) == 16


def test_parquet_reads_like_json_lines(tmp_path: Path) -> None:
    rows = [{"question": "a", "messages": CHAT, "n": 1, "day": "2024-05-01"}, {"question": "b", "n": None}]
    dated = [rows[0] | {"day": datetime.date(2024, 5, 1)}, rows[1]]
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(dated), path)
    assert list(read_tasks(path)) == list(read_tasks(write_jsonl(tmp_path, *rows)))


def test_files_are_read_lazily(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "good"}\n\xff\xfe\n')
    tasks = read_tasks(path)
    assert next(tasks).main_query == "good"
    with pytest.raises(ConfigError, match="line 2 is not valid JSON"):
        next(tasks)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 3: must be a JSON object, got list"),
        ('{"answer": 1}', "line 3: there is no prompt; fill one of the columns messages"),
        ('{"question": "  "}', "line 3: there is no prompt"),
        ('{"question": "q", "metadata": [1]}', "line 3: metadata must be an object"),
        ('{"messages": ["hi"]}', "line 3: init_messages.0"),
        ('{"question": "q", "x": NaN}', "line 3: a value cannot be JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_jsonl(tmp_path, {"question": "fine"}, "\n", line)
    with pytest.raises(ConfigError) as caught:
        list(read_tasks(path))
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ConfigError, match=r"tasks.parquet is not a readable Parquet file"):
        list(read_tasks(path))
    with pytest.raises(ConfigError, match="there is no file"):
        read_tasks(tmp_path / "none.jsonl")
    (tmp_path / "tasks.csv").write_text("question\nwhy\n")
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet files, hf:NAME or module:function, not \.csv"):
        read_tasks(tmp_path / "tasks.csv")


@pytest.mark.parametrize(
    ("source", "name", "config", "split"),
    [
        ("hf:openai/gsm8k", "openai/gsm8k", None, "train"),
        ("hf:openai/gsm8k:test", "openai/gsm8k", None, "test"),
        ("hf:openai/gsm8k@main:test[:10%]", "openai/gsm8k", "main", "test[:10%]"),
    ],
)
def test_rows_of_a_dataset_are_streamed(
    monkeypatch: pytest.MonkeyPatch, source: str, name: str, config: str | None, split: str
) -> None:
    calls: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        calls.append((name, config, split, streaming))
        yield {"question": "1+1?", "answer": "2"}
        yield {"question": "2+2?", "answer": "4"}
        raise ConnectionError("the hub is\nnot reachable")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    tasks = read_tasks(source)
    assert [next(tasks).main_query, next(tasks).main_query] == ["1+1?", "2+2?"]
    assert calls == [(name, config, split, True)]
    with pytest.raises(ConfigError, match=r"after row 2: ConnectionError: the hub is not reachable; .*\.jsonl"):
        next(tasks)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf::train", "names no dataset"),
        ("hf:a/b", r"pip install '\.\[train\]' in a clone"),
        ("q.parquet", r"pip install '\.\[parquet\]' in a clone"),
    ],
)
def test_missing_libraries_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.parquet").touch()
    for library in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=message):
        list(read_tasks(source))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("datasets") is None, reason="`datasets` is not installed")
def test_the_real_library_reads_a_folder(tmp_path: Path) -> None:
    """In a process of its own: the library warns and starts threads as it likes."""
    (tmp_path / "train.jsonl").write_text('{"question": "0?"}\n{"question": "1?"}\n')
    code = "import sys; from swarm.data import read_tasks; print([task.main_query for task in read_tasks(sys.argv[1])])"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code, f"hf:{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout == "['0?', '1?']\n", done.stderr


@pytest.fixture
def tasks_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_tasks.py").write_text(
        "from swarm.types import Task\n"
        "read = 0\n"
        "def numbers():\n"
        "    global read\n"
        "    for n in range(100_000):\n"
        "        read += 1\n"
        "        yield {'question': f'{n}?'} if n % 2 else Task(task_id=str(n), main_query=f'{n}?')\n"
        "once = iter([{'question': 'why?'}])\n"
        "wrong = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_tasks"
    del sys.modules["my_tasks"]


def test_tasks_of_a_function_are_read_as_they_are_needed(tasks_module: str) -> None:
    tasks = list(islice(epochs_of(f"{tasks_module}:numbers", seed=1), 10))
    assert all(task.main_query.endswith("?") and task.task_id for task in tasks)
    assert sys.modules[tasks_module].read < 2 * SHUFFLE_TASKS
    assert [task.task_id for task in tasks] != sorted(task.task_id for task in tasks)
    assert tasks == list(islice(epochs_of(f"{tasks_module}:numbers", seed=1), 10)), "the seed decides"


def test_what_gives_no_tasks_or_only_once_is_named(tasks_module: str) -> None:
    with pytest.raises(ConfigError, match="gives a int"):
        read_tasks(f"{tasks_module}:wrong")
    with pytest.raises(ConfigError, match="can be read only once; give a function"):
        list(epochs_of(f"{tasks_module}:once", seed=0))
    with pytest.raises(ConfigError, match="has no attribute 'none'"):
        read_tasks(f"{tasks_module}:none")


@given(count=st.integers(0, 30), among=st.integers(1, 12), seed=st.integers(0, 5))
def test_a_shuffled_stream_has_everything_once_and_holds_no_more_than_it_may(count: int, among: int, seed: int) -> None:
    read = itertools.count()
    stream = shuffled((next(read) for _ in range(count)), seed, among)
    got: list[int] = []
    for item in stream:
        got.append(item)
        # as many are held as may be, and one more is read to draw
        assert max(got) < len(got) + among
    assert sorted(got) == list(range(count))
