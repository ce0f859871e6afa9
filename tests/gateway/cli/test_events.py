import json

import pytest

from gateway.cli.events import EventPrinter

STEP = {"step": 3, "batch_id": "b", "metrics": {"swarm/reward_mean": 0.4123}, "seconds": 9.81}


def printed(capsys: pytest.CaptureFixture[str], as_json: bool, *events: tuple[str, dict[str, object]]) -> str:
    with EventPrinter(as_json) as on_event:
        for kind, values in events:
            on_event(kind, values)
    return capsys.readouterr().out


def test_scripts_get_one_json_object_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, True, ("step", STEP), ("stopped", {}))
    first, second = map(json.loads, out.splitlines())
    assert first["event"] == "step"
    assert first["metrics"] == STEP["metrics"]
    assert second["event"] == "stopped"


def test_people_get_the_address_to_point_their_app_at(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        False,
        ("listening", {"name": "gateway", "url": "http://127.0.0.1:8000", "log": "/x/gateway.log"}),
        ("ready", {"model": "tiny", "seconds": 61.0}),
        ("step", STEP),
    )
    assert "http://127.0.0.1:8000/v1 (model tiny)" in out
    assert "step    3  reward 0.412  9.8 s" in out


def test_a_failure_shows_its_last_lines_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        False,
        ("failed", {"message": "the engine died", "last_lines": ["[red]x[/red]"], "log": "/x/engine.log"}),
    )
    assert "FAILED: the engine died" in out
    assert "| [red]x[/red]" in out
    assert "/x/engine.log" in out


def test_states_are_for_the_spinner_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, False, ("state", {"state": "ENGINE.ROLLING", "detail": ""})) == ""
