"""Rows for verl's trainer, built from a batch."""

from __future__ import annotations

import pytest

from swarm.tokens import Timeline, TrainBatch, TrainGroup, Trajectory
from tests.token_data import timeline, trajectory

torch = pytest.importorskip("torch")
feed = pytest.importorskip("adapters.verl.feed")


def make_timeline(prompt: list[int], response: list[int], mask: list[int] | None = None, version: int = 4) -> Timeline:
    mask = mask or [1] * len(response)
    return timeline(prompt, response, version, version + 1, response_mask=mask, logprobs=[-0.5 * bit for bit in mask])


def make_trajectory(uuid: str, reward: float, *timelines: Timeline) -> Trajectory:
    return trajectory(*timelines, episode_uuid=uuid, reward=reward, num_calls=1)


def make_batch(*groups: list[Trajectory]) -> TrainBatch:
    return TrainBatch(
        batch_id="b", groups=[TrainGroup(task_id=str(i), trajectories=group) for i, group in enumerate(groups)]
    )


def test_a_row_holds_exactly_the_sampled_tokens() -> None:
    timeline = make_timeline([1, 2, 3], [4, 5, 6, 7], mask=[1, 0, 0, 1])
    row = feed.timeline_fields(timeline, uid="u", reward=0.75)
    assert row["prompts"].tolist() == [1, 2, 3]
    assert row["responses"].tolist() == [4, 5, 6, 7]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row["position_ids"].tolist() == list(range(7))
    assert row["response_mask"].tolist() == row["loss_mask"].tolist() == [1, 0, 0, 1]
    assert row["rollout_log_probs"].tolist() == [-0.5, 0.0, 0.0, -0.5]
    assert row["rm_scores"].tolist() == [0.0, 0.0, 0.0, 0.75]
    assert {row[name].dtype for name in ("prompts", "responses", "input_ids", "position_ids", "loss_mask")} == {
        torch.int64
    }
    assert row["rollout_log_probs"].dtype == row["rm_scores"].dtype == torch.float32


def test_tag_has_lengths_and_the_versions_that_sampled() -> None:
    tag = feed.timeline_tag(make_timeline([1, 2, 3], [4, 5], version=6), step=7)
    assert tag == {
        "status": "success",
        "prompt_len": 3,
        "response_len": 2,
        "seq_len": 5,
        "global_steps": 7,
        "min_global_steps": 6,
        "max_global_steps": 7,
    }


def test_uneven_groups_and_several_timelines_get_keys_of_their_own() -> None:
    one, two = make_timeline([1], [2]), make_timeline([1, 2], [3, 4])
    batch = make_batch(
        [make_trajectory("a", 1.0, one, two), make_trajectory("b", 0.0, one)],
        [make_trajectory("c", 0.5, two)],
    )
    first, second = feed.batch_rows(batch, ["u0", "u1"], step=3)
    assert (first.uid, first.keys) == ("u0", ["u0_0_0", "u0_0_1", "u0_1_0"])
    assert (second.uid, second.keys) == ("u1", ["u1_0_0"])
    # every timeline of a trajectory carries its reward: verl takes the advantage from the last one
    assert [row["rm_scores"][-1].item() for row in first.fields] == [1.0, 1.0, 0.0]
    assert {tag["global_steps"] for tag in first.tags + second.tags} == {3}


def test_timeline_without_a_sampled_token_is_not_trained() -> None:
    observed = make_timeline([1], [2, 3], mask=[0, 0])
    batch = make_batch([make_trajectory("a", 1.0, make_timeline([1], [2]), observed)])
    assert feed.batch_rows(batch, ["u"], step=1)[0].keys == ["u_0_0"]


def test_trajectory_without_any_sampled_token_is_an_error() -> None:
    batch = make_batch([make_trajectory("ep-1", 1.0, make_timeline([1], [2], mask=[0]))])
    with pytest.raises(ValueError, match="ep-1 has no token"):
        feed.batch_rows(batch, ["u"], step=1)
