"""What the monitor's gateway view makes of a status."""

from __future__ import annotations

from gateway.stats import GatewayStatus
from gateway.tui.gateway_view import view

STATUS = {"requests": 1, "groups": {"trained": 0, "dropped": {}, "uninformative": 0}, "routes": {}}
TOLD = {"sampled": 12000, "timelines": 40, "trained": 11000, "repeated": 0, "dropped": 1000, "masked": 7, "prompts": 9}
CALLS = {"calls": 41, "kept": 30, "lost": 2, "edited": 1, "unmerged": 3}


def test_one_line_has_what_the_swarm_server_counted() -> None:
    accounted = {"tokens": {**TOLD, **CALLS}, "why": {"vLLM's tokens disagree": 1000}}
    told = view(GatewayStatus.model_validate({**STATUS, "accounted": accounted}), 0.0).head
    [line] = [line.text for line in told if line.label == "server"]
    assert line == (
        "12.0k sampled in 40 rows: 11.0k trained, 0 repeated, 1000 dropped (vLLM's tokens disagree); 7 masked; "
        "of 41 calls 30 kept, 2 lost, 1 edited"
    )
    assert not [line for line in view(GatewayStatus.model_validate(STATUS), 0.0).head if line.label == "server"]
