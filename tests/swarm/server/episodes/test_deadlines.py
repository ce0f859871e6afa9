"""The heap of deadlines against asking every episode, and what it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.server.episodes.episode import Deadlines, LiveEpisode
from swarm.server.journal.rows import EpisodeRow


def episode(number: int, now: float, idle: float, cap: float) -> LiveEpisode:
    claim = EpisodeRow(str(number), "me", "train", b"", idle, cap, 0.0)
    return LiveEpisode(claim, now, now + cap, [])


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["claim", "begin", "end", "over", "wait"]), st.integers(0, 5), st.integers(1, 9)),
    max_size=60,
)


@given(ACTIONS)
def test_what_is_due_is_what_asking_everyone_finds(actions: list[tuple[str, int, int]]) -> None:
    running: dict[str, LiveEpisode] = {}
    deadlines = Deadlines(running)
    now = 0.0
    for number, (action, which, amount) in enumerate(actions):
        if action == "claim":
            one = episode(number, now, float(amount), 3.0 * which + 1)
            running[one.episode_uuid] = one
            deadlines.add(one)
        elif action == "wait":
            now += amount
        elif running:
            one = list(running.values())[which % len(running)]
            if action == "over":
                del running[one.episode_uuid]
            else:
                one.in_flight = 1 if action == "begin" else 0
                one.last_active = now
        expected = {uuid for uuid, one in running.items() if one.deadline() <= now}
        due = deadlines.due(now)
        assert {one.episode_uuid for one in due} == expected and len(due) == len(expected)
        for one in due:
            del running[one.episode_uuid]
        first = deadlines.next()
        assert (first is None) == (not running)
        assert first is None or now < first <= min(
            min(one.cap, now + one.claim.idle_timeout) if one.in_flight else one.deadline() for one in running.values()
        )
