"""Checkpoints of a run on a disk: whole or not there, the latest and the best, and none where there is no room."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.verl.checkpoints import Checkpoints, roll_back
from swarm.checkpoints import (
    LATEST,
    best_step,
    checkpoint,
    hold,
    kept_steps,
    saved_step,
    score_of,
    why_kept,
)
from swarm.errors import ConfigError, EngineError
from swarm.job import TrainJob
from tests.disks import fill, small_disk

Usage = namedtuple("Usage", "total used free")


def writer(step: int, size: int = 10) -> Callable[[Path], None]:
    """As verl writes."""

    def write(folder: Path) -> None:
        (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
        (folder / f"global_step_{step}" / "actor" / "weights").write_bytes(b"x" * size)
        (folder / LATEST).write_text(str(step))

    return write


def write(checkpoints: Checkpoints, step: int, reward: float | None = None, size: int = 10) -> str:
    if reward is not None:
        checkpoints.reward(reward)
    return checkpoints.save(step, f"b{step}", writer(step, size))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, tmp_path)
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        write(checkpoints, step, reward)
    assert names(tmp_path) == ["global_step_2", "global_step_4", "global_step_5", LATEST]
    assert (tmp_path / LATEST).read_text() == "5"
    # another process goes on: what was the best is known
    again = Checkpoints(tmp_path, 1, tmp_path)
    write(again, 6, 0.5)
    assert names(tmp_path) == ["global_step_2", "global_step_6", LATEST]
    write(again, 7, 0.95)
    assert names(tmp_path) == ["global_step_7", LATEST]


def test_a_disk_budget_takes_the_oldest_of_the_latest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 4, tmp_path, keep_gb=3.5e-4)
    for step, reward in ((1, 0.9), (2, 0.1), (3, 0.2)):
        write(checkpoints, step, reward, size=100_000)
    assert kept_steps(tmp_path) == [1, 2, 3]
    going = [step for step, why in why_kept(tmp_path, 4, 3.5e-4).items() if "goes once the next one is written" in why]
    assert going == [2]
    write(checkpoints, 4, 0.3, size=100_000)
    assert kept_steps(tmp_path) == [1, 3, 4], "the best stays"
    # what must stay goes beyond the budget
    hold(tmp_path, {3: "promoted on chat", 4: "pinned on chat"})
    write(checkpoints, 5, 0.4, size=100_000)
    assert kept_steps(tmp_path) == [1, 3, 4, 5]
    write(checkpoints, 6, 0.4, size=100_000)
    assert kept_steps(tmp_path) == [1, 3, 4, 6]


def test_what_is_held_stays_until_it_is_let_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, tmp_path)
    write(checkpoints, 1, 0.1)
    write(checkpoints, 2, 0.2)
    hold(tmp_path, {2: "promoted on chat", 7: "of which no checkpoint was written"})
    (tmp_path / ".removed-1").mkdir()
    for step, reward in ((3, 0.9), (4, 0.3), (5, 0.4)):
        write(checkpoints, step, reward)
    assert kept_steps(tmp_path) == [2, 3, 5]
    goes = "goes once the next one is written"
    assert why_kept(tmp_path, 1) == {
        2: ["promoted on chat"],
        3: ["the best"],
        5: ["the run goes on from it", goes],
    }
    hold(tmp_path, {})
    write(checkpoints, 6, 0.4)
    assert names(tmp_path) == ["global_step_3", "global_step_6", "held.json", LATEST], "nothing of a killed removal"


def test_nothing_goes_while_it_cannot_be_read_what_is_held(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, tmp_path)
    write(checkpoints, 1, 0.1)
    hold(tmp_path, {1: "promoted on chat"})
    held = tmp_path / "held.json"
    said = held.read_bytes()
    for step, text in ((2, "{"), (3, "[]")):
        held.write_text(text)
        write(checkpoints, step, 0.2)
    assert kept_steps(tmp_path) == [1, 2, 3]
    assert "held.json cannot be read, which says what stays" in why_kept(tmp_path, 1)[1]
    held.write_bytes(said)
    write(checkpoints, 4, 0.3)
    assert kept_steps(tmp_path) == [1, 4]


def test_a_checkpoint_counts_the_steps_since_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, tmp_path)
    for reward in (1.0, 0.0):
        checkpoints.reward(reward)
    write(checkpoints, 2)
    write(checkpoints, 3, 0.4)
    assert names(tmp_path) == ["global_step_2", "global_step_3", LATEST], "0.5 is the best"


def test_a_checkpoint_that_fails_leaves_nothing_and_the_one_before_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, tmp_path)
    write(checkpoints, 1, 0.1)

    def fail(folder: Path) -> None:
        (folder / "global_step_2").mkdir(parents=True)
        raise RuntimeError("no such tensor")

    with pytest.raises(RuntimeError, match="no such tensor"):
        checkpoints.save(2, "b2", fail)
    assert names(tmp_path) == ["global_step_1", LATEST] and (tmp_path / LATEST).read_text() == "1"


def test_a_checkpoint_knows_the_batch_that_it_learned_from(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path, 1, tmp_path), 4, 0.1)
    again = Checkpoints(tmp_path, 1, tmp_path)
    assert (again.batch_of(4), again.batch_of(5)) == ("b4", "")


def test_a_killed_process_leaves_nothing_that_counts(tmp_path: Path) -> None:
    (tmp_path / ".incomplete" / "global_step_2").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, 1, tmp_path)
    write(checkpoints, 3, 0.1)
    assert names(tmp_path) == ["global_step_3", LATEST]


def test_the_same_step_may_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2, tmp_path)
    write(checkpoints, 1, 0.1)
    write(checkpoints, 1, 0.2, size=20)
    assert (tmp_path / "global_step_1" / "actor" / "weights").stat().st_size == 20


def test_room_is_asked_for_by_the_last_checkpoint_or_by_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 100)
    # the same weights once more
    (model / "pytorch_model.bin").write_bytes(b"x" * 100)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, model)
    free = 599
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
    assert "a checkpoint takes up to 0.0 GB" in checkpoints.lacking()
    free = 600
    assert checkpoints.lacking() == ""
    # an adapter has next to no moments
    free = 300
    assert Checkpoints(tmp_path / "adapters", 1, model, with_adapter=True).lacking() == ""
    free = 600
    write(checkpoints, 1, size=5_000)
    assert checkpoints.lacking() != ""
    free = 6_000
    assert checkpoints.lacking() == ""


def test_a_folder_that_cannot_be_made_is_told_as_such(tmp_path: Path) -> None:
    def write(aside: Path) -> None:
        raise PermissionError(f"nobody may make {aside}")

    with pytest.raises(PermissionError, match="nobody may make"):
        Checkpoints(tmp_path / "not" / "there", 2, tmp_path).save(1, "b1", write)


def test_what_a_killed_save_or_removal_has_left_is_no_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Checkpoints(tmp_path, 2, tmp_path), 10)
    for left in (".incomplete", ".removed-5"):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**9))
        writer(5, size=10_000)(tmp_path / left)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 0))
        again = Checkpoints(tmp_path, 2, tmp_path)
        assert again.lacking() == "" and write(again, 20) == ""
        assert names(tmp_path) == ["global_step_10", "global_step_20", LATEST]
        assert again.lacking() != ""


def test_a_full_disk_costs_checkpoints_and_no_training_and_each_step_tries_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24) as folder:
        checkpoints = Checkpoints(folder, 2, tmp_path)
        assert write(checkpoints, 10, 0.5, size=6 << 20) == ""
        ballast = fill(folder)
        told = write(checkpoints, 20, 0.6, size=6 << 20)
        assert f"the checkpoint of step 20 is not written: 0.0 GB are free in {folder}" in told
        assert "free some space there" in told
        assert not checkpoints.overdue(20) and checkpoints.overdue(21), "nobody tries twice in one step"
        assert write(checkpoints, 21, 0.6, size=6 << 20) == "", "it is told once"
        # there was room when it began: somebody else fills the disk meanwhile
        ballast.unlink()

        def fills(aside: Path) -> None:
            fill(folder)
            writer(22, 6 << 20)(aside)

        assert write(checkpoints, 22, 0.6, size=1).startswith("the disk has room again"), "it recovered"
        assert "the disk of" in checkpoints.save(23, "b23", fills)
        assert names(folder) == ["ballast", "global_step_10", "global_step_22", LATEST], "no part is left"
        (folder / "ballast").unlink()
        assert write(checkpoints, 24, 0.7, size=1) == "the disk has room again: the checkpoint of step 24 is written"
        assert not checkpoints.overdue(25)


def test_no_rank_goes_on_where_one_of_several_found_the_disk_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24) as folder:
        (tmp_path / "model.safetensors").write_bytes(b"x" * (1 << 20))
        checkpoints = Checkpoints(folder, 2, tmp_path, ranks=2)

        def fills(aside: Path) -> None:
            fill(folder)
            writer(1, 6 << 20)(aside)

        with pytest.raises(EngineError, match=f"of step 1 could not be written: the disk of {folder} is full"):
            checkpoints.save(1, "b1", fills)
        assert names(folder) == ["ballast"], "no part is left"
        # it was noticed before anybody wrote: the others wait for nobody
        assert "the checkpoint of step 2 is not written" in checkpoints.save(2, "b2", writer(2, 6 << 20))


def test_a_run_that_begins_anew_neither_sees_nor_loses_those_of_an_earlier_one(tmp_path: Path) -> None:
    earlier = Checkpoints(tmp_path, 2, tmp_path)
    for step in (20, 30):
        write(earlier, step, 0.9)
    another = Checkpoints(tmp_path, 2, tmp_path)
    another.set_aside(resumes=False)
    assert names(tmp_path) == ["earlier-1"], "nothing to resume from"
    write(another, 10, 0.1)
    assert names(tmp_path) == ["earlier-1", "global_step_10", LATEST]
    assert names(tmp_path / "earlier-1") == ["global_step_20", "global_step_30", LATEST]
    # what goes on keeps what it goes on from
    Checkpoints(tmp_path, 2, tmp_path).set_aside(resumes=True)
    assert names(tmp_path) == ["earlier-1", "global_step_10", LATEST]
    Checkpoints(tmp_path / "new", 2, tmp_path).set_aside(resumes=False)
    assert not (tmp_path / "new").exists()


def test_going_back_keeps_later_steps_beside_and_never_takes_them_for_later_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 4, tmp_path)
    for step, reward in ((3, 0.3), (6, 0.9), (9, 0.1)):
        write(checkpoints, step, reward)
    assert (kept_steps(tmp_path), best_step(tmp_path)) == ([3, 6, 9], 6)
    with pytest.raises(ConfigError, match=r"step 4 is not kept in .*; kept are 3, 6, 9"):
        roll_back(tmp_path, 4)
    assert roll_back(tmp_path, 9) is None, "it is the last one"
    assert roll_back(tmp_path, 3) == tmp_path / "earlier-1"
    assert names(tmp_path / "earlier-1") == ["global_step_6", "global_step_9", LATEST]
    with pytest.raises(
        ConfigError, match=r"step 9 is not kept in .*; kept are 3; one of that number is in .*earlier-1"
    ):
        roll_back(tmp_path, 9)
    again = Checkpoints(tmp_path, 1, tmp_path)
    again.set_aside(resumes=True)
    write(again, 6, 0.1)
    assert names(tmp_path) == ["earlier-1", "global_step_3", "global_step_6", LATEST], "6 is the latest, 3 the best"
    assert (tmp_path / LATEST).read_text() == "6"


def test_one_that_was_killed_while_it_went_back_has_gone_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 4, tmp_path)
    for step in (3, 6):
        write(checkpoints, step, 0.5)
    (tmp_path / LATEST).write_text("3")
    Checkpoints(tmp_path, 4, tmp_path).set_aside(resumes=True)
    assert names(tmp_path) == ["earlier-1", "global_step_3", LATEST]


@pytest.mark.parametrize("noted", ["9", ""])
def test_a_copy_whose_note_names_no_checkpoint_goes_on_from_the_latest_that_is_there(
    tmp_path: Path, noted: str
) -> None:
    checkpoints = Checkpoints(tmp_path, 4, tmp_path)
    for step in (3, 6):
        write(checkpoints, step, 0.5)
    # without our note
    (tmp_path / "global_step_7").mkdir()
    (tmp_path / LATEST).write_text(noted)
    job = TrainJob(model="m", checkpoint_dir=str(tmp_path))
    assert saved_step(job, tmp_path) == 6
    Checkpoints(tmp_path, 4, tmp_path).set_aside(resumes=True)
    assert kept_steps(tmp_path) == [3, 6] and (tmp_path / LATEST).read_text() == "6", "verl reads it"
    assert "the run goes on from it" in why_kept(tmp_path, 4)[6]


def test_a_checkpoint_notes_the_versions_that_wrote_it(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path, 1, tmp_path), 1, 0.25)
    score = score_of(checkpoint(tmp_path, 1))
    assert score["reward_mean"] == 0.25 and set(score["versions"]) <= {"verl", "vllm", "torch", "transformers"}
    assert score_of(tmp_path) == {}
