"""Task readers: columns, ids, laziness, and errors that name file and line."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.data import read_tasks, task_of
from swarm.errors import ConfigError

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]


def write_jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("column", ["question", "prompt", "main_query", "query"])
def test_a_text_column_is_the_query(tmp_path: Path, column: str) -> None:
    [task] = read_tasks(write_jsonl(tmp_path, {column: "why?", "answer": 42}))
    assert (task.main_query, task.init_messages, task.metadata) == ("why?", [], {"answer": 42})


@pytest.mark.parametrize("column", ["messages", "init_messages", "prompt"])
def test_a_column_of_messages_fills_query_and_messages(tmp_path: Path, column: str) -> None:
    [task] = read_tasks(write_jsonl(tmp_path, {column: CHAT}))
    assert (task.main_query, task.init_messages) == ("why?", CHAT)


def test_query_and_messages_together_are_both_kept() -> None:
    task = task_of({"question": "short", "messages": CHAT}, "here")
    assert (task.main_query, task.init_messages, task.metadata) == ("short", CHAT, {})


def test_given_ids_are_used_and_numbers_become_text() -> None:
    assert task_of({"question": "q", "task_id": "t-1"}, "here").task_id == "t-1"
    assert task_of({"question": "q", "id": 7}, "here").task_id == "7"


def test_an_absent_or_empty_id_is_a_hash_of_the_row() -> None:
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


def test_metadata_columns_win_over_loose_ones() -> None:
    task = task_of({"question": "q", "level": 1, "metadata": {"level": 2}, "env_type": "shell"}, "here")
    assert (task.metadata, task.env_type) == ({"level": 2}, "shell")


def test_parquet_reads_like_json_lines(tmp_path: Path) -> None:
    rows = [{"question": "a", "messages": CHAT, "n": 1}, {"question": "b", "n": None}]
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert list(read_tasks(path)) == list(read_tasks(write_jsonl(tmp_path, *rows)))


def test_dates_in_parquet_become_text(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "a", "asked": datetime.date(2024, 5, 1)}]), path)
    assert next(read_tasks(path)).metadata == {"asked": "2024-05-01"}


def test_files_are_read_lazily(tmp_path: Path) -> None:
    tasks = read_tasks(write_jsonl(tmp_path, {"question": "good"}, "{bad\n"))
    assert next(tasks).main_query == "good"
    with pytest.raises(ConfigError, match="line 2 is not valid JSON"):
        next(tasks)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 3: must be a JSON object, got list"),
        ('{"answer": 1}', "line 3: asks nothing; fill one of the columns messages"),
        ('{"question": "  "}', "line 3: asks nothing"),
        ('{"question": "q", "metadata": [1]}', "line 3: metadata must be an object"),
        ('{"messages": ["hi"]}', "line 3: init_messages.0"),
        ('{"question": "q", "x": NaN}', "line 3: holds a value that JSON cannot"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write_jsonl(tmp_path, {"question": "fine"}, "\n", line)
    with pytest.raises(ConfigError) as caught:
        list(read_tasks(path))
    assert str(path) in caught.value.message
    assert said in caught.value.message


def test_a_byte_order_mark_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q"}\n\xff\xfe\n')
    tasks = read_tasks(path)
    assert next(tasks).main_query == "q"
    with pytest.raises(ConfigError, match="line 2"):
        next(tasks)


def test_a_bad_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ConfigError, match=r"tasks.parquet is not a readable Parquet file"):
        list(read_tasks(path))


def test_missing_files_and_unknown_kinds_fail_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_tasks(tmp_path / "none.jsonl")
    (tmp_path / "tasks.csv").write_text("question\nwhy\n")
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet files or hf:NAME, not \.csv"):
        read_tasks(tmp_path / "tasks.csv")
