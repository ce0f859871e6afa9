"""Advantages by episodes: factors and settings here, the numbers by verl's real trainer code against hand-made ones."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest

from adapters.verl.advantage import advantage_values, episode_factors
from swarm.job import TrainJob

#: Two groups, a group of one, and one of equal rewards; episodes of one and of three timelines.
GROUPS = [
    [{"reward": 1.0, "timelines": 3}, {"reward": 0.0, "timelines": 1}, {"reward": 0.5, "timelines": 1}],
    [{"reward": 0.2, "timelines": 1}, {"reward": 0.9, "timelines": 3}],
    [{"reward": 0.7, "timelines": 1}],
    [{"reward": 783.5020698463665, "timelines": 1}] * 7,
]
#: With what each episode is credited: one of a group, as for the answer that was delivered.
CREDITED = [(GROUPS[0], [0.0, 0.7, 0.0]), (GROUPS[1], [-1.5, 0.0]), (GROUPS[2], [0.25]), (GROUPS[3], [0.5] + [0.0] * 6)]


def by_hand(advantage: str, rewards: list[float]) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    mean = fmean(rewards)
    match advantage:
        case "grpo":
            return [(reward - mean) / (stdev(rewards) + 1e-6) for reward in rewards]
        case "dr_grpo":
            return [reward - mean for reward in rewards]
        case _:
            return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


# verl imports what Ray has moved
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_verl_computes_by_episodes_what_a_hand_would() -> None:
    pytest.importorskip("verl")
    from tests.adapters.verl.compute_advantages import advantages, verls_own_rloo

    names = ["grpo", "dr_grpo", "rloo"]
    rewards = [[episode["reward"] for episode in group] for group in GROUPS]
    credited = [[{**episode, "credit": credit} for episode, credit in zip(*pair, strict=True)] for pair in CREDITED]
    cases = [{"advantage": name, "groups": groups} for name in names for groups in (GROUPS, credited)]
    cases.append({"advantage": "grpo", "estimator": "rloo", "groups": GROUPS})
    # whose baseline is the mean of all groups
    plain = [[{"reward": reward, "timelines": 1}] * 2 for reward in (0.9, 0.1)]
    other = {"advantage": "grpo", "estimator": "reinforce_plus_plus", "groups": plain}
    above, below = advantages(other)
    assert above[0][0][-1] > 0 > below[0][0][-1], "an estimator that an override names stays what it is"
    for case in cases:
        found = advantages(case)
        name = case.get("estimator", case["advantage"])
        for group, rewarded, episodes in zip(case["groups"], rewards, found, strict=True):
            for episode, value, timelines in zip(group, by_hand(name, rewarded), episodes, strict=True):
                # by its own reward in the group, and by what it alone is credited with
                value += episode.get("credit", 0.0)
                assert len(timelines) == episode["timelines"]
                for tokens in timelines:
                    # the token in the middle is a tool's
                    assert tokens == pytest.approx([value, 0.0, value], abs=1e-5), name
    for group in rewards[:2]:
        assert verls_own_rloo(group) == pytest.approx(by_hand("rloo", group), abs=1e-5), (
            "our formula is verl's, where timelines are 1"
        )


def test_a_factor_counts_episodes_and_not_rows() -> None:
    keys = ["a_0_0", "a_0_1", "a_0_2", "a_1_0", "a_2_0", "b_0_0", "b_0_1"]
    rewards = [1.0, 1.0, 1.0, 0.0, 1.0, 0.5, 0.5]
    assert episode_factors(keys, rewards, leave_one_out=True) == [1.5] * 5 + [0.0] * 2
    assert episode_factors(keys, rewards, leave_one_out=False) == [1.0] * 5 + [0.0] * 2


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_teach_nothing(leave_one_out: bool) -> None:
    # the trainer's numbers have seven digits: 0.3 and 0.1 + 0.2 are one
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.0, 1e-9]
    factors = episode_factors(["a_0_0", "a_1_0", "a_2_0", "b_0_0", "b_1_0"], rewards, leave_one_out=leave_one_out)
    assert factors[:3] == [0.0] * 3
    assert all(factors[3:])


def test_equal_rewards_may_differ_by_a_penalty() -> None:
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_0_1"]
    assert episode_factors(keys, None, leave_one_out=False) == [1.0, 1.0, 0.0, 0.0]
    assert episode_factors(keys, None, leave_one_out=True) == [2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("advantage", "estimator", "by_std"), [("grpo", "grpo", True), ("dr_grpo", "grpo", False), ("rloo", "rloo", False)]
)
def test_an_advantage_is_settings_of_verl(advantage: str, estimator: str, by_std: bool) -> None:
    job = TrainJob.model_validate({"model": "m", "advantage": advantage, "max_response_length": 77})
    values = advantage_values(job)
    assert values.pop("algorithm.adv_estimator") == estimator
    assert values.pop("algorithm.norm_adv_by_std_in_grpo") is by_std
    actor = "actor_rollout_ref.actor"
    summed = {f"{actor}.loss_agg_mode": "seq-mean-token-sum-norm", f"{actor}.loss_scale_factor": 77}
    assert values == (summed if advantage == "dr_grpo" else {})
