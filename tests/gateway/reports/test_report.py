import json
import resource
import sys
from pathlib import Path

import pytest

from gateway.reports.printing import print_report, summary, write_report
from gateway.reports.report import (
    Curves,
    Failure,
    Latency,
    Report,
    SavedAnswer,
    Score,
    StepPoint,
    TrainingReport,
    points_of_evaluations,
    points_of_steps,
    read_report,
)
from swarm.errors import ConfigError
from swarm.types import EvalResult, StepResult

EVALUATED = "eval/reward_mean"


def report(label: str = "run", rewards: tuple[float, ...] = (0.1, 0.2, 0.3, 0.7, 0.8, 0.9)) -> Report:
    steps = [StepPoint(step=n, reward_mean=reward, response_tokens=40.0) for n, reward in enumerate(rewards, 1)]
    return Report(
        label=label,
        data="q.jsonl",
        target="app",
        model="tiny",
        seed=0,
        concurrency=4,
        seconds=60.0,
        stopped_because="all prompts sent",
        requests=10,
        answered=8,
        cancelled=1,
        failures={"timeout": Failure(count=1, example="no answer")},
        latency=Latency(mean=2.0, p50=1.0, p95=3.0),
        steps=steps,
    )


def test_what_was_answered_and_not_trained_is_told_by_why() -> None:
    told = report().model_copy(update={"untrained": {"batch_waits": 3, "reward_hook_failed": 1}})
    assert "answered and not trained: 3 x batch_waits, 1 x reward_hook_failed" in summary(told)


def test_a_step_without_a_reward_is_absent_not_zero() -> None:
    steps = [
        StepResult(step=1, batch_id="a", metrics={}, seconds=1.0),
        StepResult(step=2, batch_id="b", metrics={"swarm/reward_mean": 0.4}, seconds=1.0),
    ]
    [point] = points_of_steps(steps)
    assert (point.step, point.reward_mean, point.response_tokens) == (2, 0.4, None)


def test_a_success_that_was_not_measured_is_not_zero() -> None:
    evaluations = [StepPoint(step=0, reward_mean=0.1), StepPoint(step=2, reward_mean=0.5, success_rate=0.5)]
    told = "\n".join(summary(report().model_copy(update={"evaluations": evaluations})))
    assert "success not known -> 50%" in told


def test_an_evaluation_without_a_reward_is_absent_too() -> None:
    # of rewards whose sum is beyond any float
    evaluations = [EvalResult(step=0, episodes=2, metrics={}), EvalResult(step=5, episodes=2, metrics={EVALUATED: 0.5})]
    assert [(point.step, point.reward_mean) for point in points_of_evaluations(evaluations)] == [(5, 0.5)]


def test_of_a_step_that_was_done_again_from_a_checkpoint_only_the_last_time_counts() -> None:
    done = [1, 2, 3, 2, 3, 4]
    steps = [
        StepResult(step=number, batch_id=str(n), metrics={"swarm/reward_mean": float(n)}, seconds=1.0)
        for n, number in enumerate(done)
    ]
    assert [(one.step, one.reward_mean) for one in points_of_steps(steps)] == [(1, 0.0), (2, 3.0), (3, 4.0), (4, 5.0)]


def test_a_report_is_written_drawn_and_read_back(tmp_path: Path) -> None:
    write_report(report(), tmp_path / "out", [report("control")])
    assert read_report(tmp_path / "out") == report()
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_half_a_character_of_an_answer_is_a_question_mark_in_a_report(tmp_path: Path) -> None:
    answer = SavedAnswer(message={"content": "caf\u00e9 \ud83d", "tool_calls": None}, finish_reason="length")
    score = Score(messages=[{"role": "user", "content": "q"}], answers=[answer])
    failures = {"HTTP 400": Failure(count=1, example="not \ud83d")}
    write_report(report().model_copy(update={"scores": [score], "failures": failures}), tmp_path)
    read = read_report(tmp_path)
    assert isinstance(read, Report) and read.scores[0].answers[0].message == {"content": "café ?", "tool_calls": None}
    assert read.failures["HTTP 400"].example == "not ?"


def test_a_report_from_before_is_still_compared_with(tmp_path: Path) -> None:
    """Until a change of versions, each score also named the gateway's hook."""
    answers = [SavedAnswer(message={"role": "assistant", "content": "a"})]
    score = Score(messages=[{"role": "user", "content": "q"}], answers=answers)
    earlier = report().model_dump(mode="json") | {"scores": [score.model_dump(mode="json") | {"hook": ""}]}
    (tmp_path / "report.json").write_text(json.dumps(earlier))
    read = read_report(tmp_path)
    assert isinstance(read, Report) and read.scores == [score]


def test_without_steps_there_is_no_picture(tmp_path: Path) -> None:
    write_report(report(rewards=()), tmp_path)
    assert not (tmp_path / "report.png").exists()


def test_files_that_are_no_report_and_folders_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the report"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a report"):
        read_report(tmp_path)
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report(report(), tmp_path / "report.json")


def test_a_report_whose_steps_the_next_one_lacks_is_kept(tmp_path: Path) -> None:
    first = report(rewards=(0.1, 0.2))
    assert write_report(first, tmp_path, keeps_earlier=True) is None
    # the same run goes on
    longer = report(rewards=(0.1, 0.2, 0.3))
    assert write_report(longer, tmp_path, keeps_earlier=True) is None
    # a run with another job, and one that was interrupted before its first step
    for number, other in enumerate((report(rewards=(0.7, 0.2)), report(rewards=())), 1):
        assert write_report(other, tmp_path, keeps_earlier=True) == tmp_path / f"report-{number}.json"
        assert read_report(tmp_path) == other
        assert (tmp_path / f"report-{number}.png").read_bytes().startswith(b"\x89PNG")
    assert read_report(tmp_path / "report-1.json") == longer
    (tmp_path / "report.json").write_text("of another program")
    assert write_report(first, tmp_path, keeps_earlier=True) == tmp_path / "report-3.json"
    assert (tmp_path / "report-3.json").read_text() == "of another program"


def test_a_disk_that_is_full_leaves_the_report_that_was_there(tmp_path: Path) -> None:
    write_report(report(), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write the report"):
            write_report(report(rewards=(0.5,)), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_report(tmp_path) == report()


def test_the_table_shows_the_run_beside_its_control(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(), [report("control", (0.5,)), report("control", (0.6,))])
    text = capsys.readouterr().out
    titles, first, *_ = text.splitlines()
    assert titles.split() == ["step", "reward", "tokens/answer", "control", "control"]
    assert first.split() == ["1", "0.100", "██" + "░" * 22, "40", "0.500", "0.600"]
    assert "control" in text
    assert "8 answered, 1 failed, 1 cancelled" in text
    assert "1 x timeout: no answer" in text
    assert "held-out prompts prove more: `swarm-gateway replay --no-train --hooks ... --compare ...`" in text


def test_the_bars_of_the_table_give_way_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = StepPoint(
        step=1, reward_mean=0.5, success_rate=0.5, response_tokens=120.0, groups=8, with_signal=5, seconds=31.2
    )
    run = report().model_copy(update={"steps": [point], "evaluations": [point]})
    widths: list[int] = []
    for columns in ("200", "80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        print_report(run)
        titles, row, *_ = capsys.readouterr().out.splitlines()
        assert titles.endswith("evaluation") and len(titles) == len(row)
        widths.append(len(row))
        assert "█░" in row
    assert widths == [97, 80, 77]


def test_a_training_without_evaluations_is_told_how_to_have_them() -> None:
    common = {name: value for name, value in report() if name in Curves.model_fields}
    run = TrainingReport(**common, workflow="my:solve", finished=64, failed=0)
    # there is no gateway and no hook to score prompts with
    told = summary(run)[-1]
    assert "held-out tasks prove more: give the file `eval` and `tasks.validation`" in told
    # it may have them
    assert told.endswith("or see why their episodes failed")


@pytest.mark.parametrize("label", ["[base]", "[/base]", r"from $\oops to $2"])
def test_a_label_is_shown_as_it_is_written(label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(), [report(label)])
    assert label in capsys.readouterr().out
    write_report(report(label), tmp_path, [report("other")])
    assert (tmp_path / "report.png").exists()


def test_what_an_application_says_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(count=2, example="<html>\n\x1b]0;owned\x07\r busy")
    print_report(report().model_copy(update={"failures": {"HTTP 500": failure}}))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "HTTP 500" in line and "busy" in line and line.isprintable()], lines


def test_it_says_whether_the_run_learns_beside_its_control_and_on_held_out_tasks() -> None:
    rewards = tuple(0.2 + 0.02 * step + 0.01 * (step % 3) for step in range(20))
    run = report(rewards=rewards)
    assert summary(run)[-2].startswith("learning: reward rose by 0.3") and summary(run)[-2].endswith("over 20 steps")
    control = report("control", tuple(reward + 0.01 * (step % 2) for step, reward in enumerate(rewards)))
    assert summary(run, [control])[-2] == run.learning(), "another run is no control"
    control = control.model_copy(update={"control": "shuffle"})
    assert summary(run, [control])[-2].startswith("not proven: reward ")
    assert run.learning([control]).endswith("over 20 steps compared with the control")
    assert control.learning([control]).startswith("control, whose rewards are shuffled")
    evaluations = [StepPoint(step=n, reward_mean=0.2 + n / 100, reward_std=0.3, episodes=100) for n in (0, 10, 20)]
    held_out = run.model_copy(update={"evaluations": evaluations})
    assert summary(held_out)[-1].startswith(
        "learning: held-out reward rose by 0.20 [0.09, 0.31] from version 0 to 20; "
    )


def test_few_steps_are_not_sold_as_a_result() -> None:
    assert report(rewards=(0.1, 0.5, 0.2, 0.6)).learning() == "not proven: reward over 4 steps tells nothing yet"


def test_the_table_says_how_many_groups_of_a_step_differ(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"swarm/reward_mean": 1.0, "swarm/tasks": 4.0, "swarm/tasks_with_signal": 0.0}
    points = points_of_steps([StepResult(step=1, batch_id="b", metrics=metrics, seconds=2.0)])
    print_report(report().model_copy(update={"steps": points}))
    text = capsys.readouterr().out
    assert "groups differ" in text and "0 of 4" in text
    print_report(report())
    assert "groups differ" not in capsys.readouterr().out


def test_many_steps_are_thinned_out_but_the_last_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(rewards=tuple(n / 1000 for n in range(1, 101))))
    rows = [line for line in capsys.readouterr().out.splitlines() if "█" in line or line.strip().startswith("100 ")]
    assert len(rows) <= 31
    assert any(line.strip().startswith("100 ") for line in rows)


def test_a_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[plots\]' in a clone"):
        write_report(report(), tmp_path / "out")
    assert read_report(tmp_path / "out") == report()
