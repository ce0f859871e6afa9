"""AgentJet's task readers: the same tasks in each epoch, with ids, from every source that they have here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.agentjet.readers import (
    AjetTaskReader,
    HuggingfaceDatRepo,
    HuggingFaceTaskReader,
    JsonlDatasetFile,
    JsonlTrainingFp,
    RouterTaskReader,
)
from swarm.errors import ConfigError

ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(30)]


def test_a_parquet_file_is_read_like_a_dataset(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    settings = AjetTaskReader(huggingface_dat_repo=HuggingfaceDatRepo(dataset_path=str(path)))
    reader = RouterTaskReader(reader_type="huggingface_dat_repo", reader_config=settings)
    first, second = (list(reader.generate_training_tasks()) for _ in range(2))
    by_id = {task.task_id: task for task in first}
    assert by_id.keys() == {str(n) for n in range(30)}
    assert by_id == {task.task_id: task for task in second}
    assert [task.task_id for task in first] != [task.task_id for task in second]
    assert by_id["3"].main_query == "3 + 1?"
    assert by_id["3"].metadata == {**ROWS[3], "original_idx": 3}
    assert len(HuggingFaceTaskReader(settings).get_validation_tasks()) == 30


def test_a_dataset_without_a_question_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, ...]] = []

    def rows(*given: str | None) -> list[tuple[str, dict[str, str]]]:
        asked.append(given)
        return [("row 1", {"title": "t", "abstract": "a"})]

    monkeypatch.setattr("swarm.agentjet.readers.read_dataset", rows)
    repo = HuggingfaceDatRepo(dataset_path="C:/data/papers", dataset_name="main", validation_split="test")
    reader = HuggingFaceTaskReader(AjetTaskReader(huggingface_dat_repo=repo))
    [task] = reader.get_training_tasks()
    assert (task.main_query, task.metadata["abstract"]) == ("Empty", "a")
    reader.get_validation_tasks()
    assert asked == [("C:/data/papers", "main", "train"), ("C:/data/papers", "main", "test")]


def test_json_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"main_query": "q", "task_id": 7, "metadata": {"a": 1}}\n\n{"target": 24}\n')
    file = JsonlTrainingFp(file_path=str(path))
    settings = AjetTaskReader(jsonl_dataset_file=JsonlDatasetFile(training=file, validation=file))
    reader = RouterTaskReader("jsonl_dataset_file", settings)
    tasks = {task.task_id: task for task in reader.get_training_tasks()}
    assert (tasks["7"].main_query, tasks["7"].metadata) == ("q", {"a": 1})
    assert (tasks["task_1"].main_query, tasks["task_1"].metadata) == ("[not defined]", {"target": 24})
    assert len(reader.get_validation_tasks()) == 2
    path.write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"train.jsonl, line 1: must be a JSON object"):
        reader.get_training_tasks()


def test_json_lines_with_nulls_are_tasks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    empty = {"main_query": "q", "task_id": None, "init_messages": None, "env_type": None, "metadata": None}
    path.write_text("".join(json.dumps(empty | {"target": number}) + "\n" for number in range(3)))
    file = JsonlTrainingFp(file_path=str(path))
    reader = RouterTaskReader("jsonl_dataset_file", AjetTaskReader(jsonl_dataset_file=JsonlDatasetFile(training=file)))
    tasks = {task.task_id: task for task in reader.get_training_tasks()}
    assert sorted(tasks) == ["task_0", "task_1", "task_2"]
    assert tasks["task_2"].metadata == empty | {"target": 2}


def test_dummies_are_numbered() -> None:
    tasks = RouterTaskReader("random_dummy", AjetTaskReader()).get_training_tasks()
    assert {task.task_id for task in tasks} == {str(n) for n in range(1000)}


@pytest.mark.parametrize("kind", ["env_service", "csv"])
def test_another_kind_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"no task reader '{kind}'"):
        RouterTaskReader(kind, AjetTaskReader())
