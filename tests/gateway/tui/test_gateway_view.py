"""What the monitor's gateway view makes of a status."""

from __future__ import annotations

from gateway.stats import GatewayStatus
from gateway.tui.gateway_view import view

STATUS = {"requests": 1, "groups": {"trained": 0, "dropped": {}, "uninformative": 0}, "routes": {}}


def test_the_head_says_whether_the_latest_groups_teach_anything() -> None:
    def learns(with_signal: int) -> str:
        recent = {"groups": 40, "with_signal": with_signal, "reward": 0.25, "spread": 4.0}
        told = view(GatewayStatus.model_validate({**STATUS, "recent": recent}), 0.0)
        assert told.reward == f"0.006, {with_signal} of 40 differ"
        [line] = [line.text for line in told.head if line.label == "learns"]
        return line

    assert learns(3) == "reward 0.006 ±0.100; 3 of 40 groups differ, of the latest judged"
    assert learns(0).startswith("! reward 0.006") and "raise job.temperature" in learns(0)
    silent = view(GatewayStatus.model_validate(STATUS), 0.0)
    assert silent.reward == "-" and not [line for line in silent.head if line.label == "learns"]


def test_what_the_tokens_of_the_other_answers_are_is_said() -> None:
    tokens = {"delivered": 100, "wasted": 700}
    told = view(GatewayStatus.model_validate({**STATUS, "tokens": tokens}), 0.0).head
    [line] = [line.text for line in told if line.label == "tokens"]
    assert "88%: the price of several answers to each request, not a fault" in line
