"""``groups``: the answers of a group and what became of each, from a journal and from a server, searched and read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.root import app
from gateway.views.groups_view import bars
from swarm.errors import ConfigError
from swarm.judged_groups import BINS, histogram
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import QuarantineRow, RunRow
from swarm.types import Notes, WorkflowOutput
from tests.standins import engine
from tests.standins.vllm import listening
from tests.swarm.server.journal.build import batch, claimed, dropped, ended, refused, stepped, taken


def said(group: str, rank: int, reward: float, **more: Any) -> WorkflowOutput:
    notes = Notes(group_id=group, rank=rank, hook="rules", request_id=f"req-{group}", session=f"chat-{group}", **more)
    return WorkflowOutput(reward=reward, notes=notes, log_metrics={"short": reward / 2})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A trained group of a gateway's, one that waits, a dropped one, and one of a client without hooks."""

    async def fill() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        names = ["a1", "a2", "b1", "b2", "c1", "c2", "d1", "d2"]
        journal.append(RunRow("r", "model: /no/such/model\n"), *(claimed(name, run_id="r") for name in names))
        question = {"task": {"main_query": "What is a monad?", "metadata": {}}}
        best = said("aaaa", 1, 1.0, route="math", delivered=True, reason="it is brief", **question)
        worst = said("aaaa", 2, 0.0, route="math", delivered=False, reason="rambles")
        journal.append(ended("a1", "a", output=best), ended("a2", "a", output=worst))
        one = batch("b1", a=["a1", "a2"])
        journal.append(*taken(one), *stepped(one, 7))
        journal.append(ended("b1", "b", output=said("bbbb", 1, 0.5)), ended("b2", "b", output=said("bbbb", 1, 0.5)))
        journal.append(ended("c1", "c", output=said("cccc", 1, 0.9)), dropped("c1", reason="too old"))
        journal.append(QuarantineRow("c2", "token truth"), refused("c2", "quarantined: token truth"))
        journal.append(ended("d1", "own task", client="agent"), ended("d2", "own task", client="agent"))
        await journal.close()

    asyncio.run(fill())
    return tmp_path


def groups(place: Path | str, *arguments: str) -> str:
    """What the command prints of the groups of a run folder, or of the server at an address."""
    where = ["--run-dir", str(place)] if isinstance(place, Path) else ["--swarm-url", place]
    command = ["groups", arguments[0], *arguments[1:], *where]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def listed(run_dir: Path | str, *options: str) -> list[str]:
    return [one["group_id"][:4] for one in json.loads(groups(run_dir, "list", "--json", *options))["groups"]]


def test_the_latest_groups_and_what_became_of_them(run_dir: Path) -> None:
    told = json.loads(groups(run_dir, "list", "--json"))
    by_task = {one["task_id"]: one for one in told["groups"]}
    assert by_task["a"]["fate"] == "trained" and by_task["a"]["step"] == 7 and by_task["a"]["route"] == "math"
    assert by_task["b"]["fate"] == "waiting" and by_task["b"]["session"] == "chat-bbbb"
    # an episode without tokens has no place in its group
    assert by_task["c"]["fate"] == "dropped: too old"
    assert [one["client"] for one in told["groups"] if one["task_id"] == "own task"] == ["c"]
    best, worst = by_task["a"]["answers"]
    assert (best["delivered"], best["rank"], best["reason"], best["components"]) == (
        True,
        1,
        "it is brief",
        {"short": 0.5},
    )
    assert (worst["delivered"], worst["state"], worst["sampled_tokens"], worst["calls"]) == (False, "trained", 1, 1)
    assert "timelines" not in best or best["timelines"] == []
    [rewards] = told["rewards"]
    assert (rewards["step"], rewards["low"], rewards["high"], sum(rewards["counts"])) == (7, 0.0, 1.0, 2)
    text = groups(run_dir, "list")
    assert "What is a monad?" in text and "dropped: too old" in text and "aaaa" in text and "chat-aaaa" in text
    assert "session chat-aaaa" in groups(run_dir, "show", "aaaa")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--find", "MONAD what"], ["aaaa"]),
        (["--find", "monad " * 100], ["aaaa"]),
        (["--find", "monad tuesday"], []),
        (["--route", "math"], ["aaaa"]),
        (["--reason", "too old"], ["cccc"]),
        (["--reason", "brief"], ["aaaa"]),
        (["--find", "chat-bbbb"], ["bbbb"]),
        (["--at-least", "0.9", "--at-most", "0.95"], ["cccc"]),
        (["--at-least", "0.5", "--at-most", "0.9"], ["cccc", "bbbb"]),
        (["--at-most=-1"], []),
        (["--limit", "1", "--route", "math"], ["aaaa"]),
    ],
)
def test_groups_are_found_by_words_route_reward_and_reason(run_dir: Path, options: list[str], found: list[str]) -> None:
    assert listed(run_dir, *options) == found


@pytest.mark.anyio
async def test_a_server_tells_the_same_of_its_own_groups(run_dir: Path) -> None:
    app = create_app(ServerConfig(run_dir=run_dir), engine_command=engine.command("train"))
    async with listening(app) as url:
        for options in ([], ["--route", "math"], ["--reason", "rambles"], ["--at-least", "0.9"], ["--find", "monad"]):
            assert await asyncio.to_thread(listed, url, *options) == listed(run_dir, *options), options
        told = [json.loads(await asyncio.to_thread(groups, place, "show", "aa", "--json")) for place in (url, run_dir)]
    assert told[0]["answers"] == told[1]["answers"] and told[0]["answers"][0]["reason"] == "it is brief"


def test_texts_are_read_by_the_models_tokenizer_where_it_is_at_hand(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoder(model: str, *, local: bool) -> Any:
        assert model == "tiny"
        return lambda ids, *, special: f"<{len(ids)} words>" if special else f"says {list(ids)}"

    monkeypatch.setattr("adapters.models.decoder", decoder)
    told = json.loads(groups(run_dir, "show", "aa", "--tokenizer", "tiny", "--json"))
    assert told["prompt"].startswith("<") and all(one["text"].startswith("says [") for one in told["answers"])
    assert "answer 2:\n    says [" in groups(run_dir, "show", "aaaa", "--tokenizer", "tiny")
    assert listed(run_dir, "--find", "says", "--tokenizer", "tiny", "--route", "math") == ["aaaa"]


def test_without_a_tokenizer_the_request_log_has_the_answer_that_was_delivered(run_dir: Path, tmp_path: Path) -> None:
    assert "no tokenizer is at hand: give --tokenizer, or --request-log" in groups(run_dir, "show", "aaaa")
    log = tmp_path / "requests.jsonl"
    entries = [
        {"request_id": f"req-{name}", "request": {"asks": name}, "answer": {"says": name}} for name in ("b", "aaaa")
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    told = json.loads(groups(run_dir, "show", "aaaa", "--request-log", str(log), "--json"))
    assert told["prompt"] == '{"asks": "aaaa"}'
    assert [one["text"] for one in told["answers"]] == ['{"says": "aaaa"}', ""]


def test_a_request_log_that_went_on_in_a_new_file_is_read_with_the_earlier_ones(run_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_text(json.dumps({"request_id": "req-b", "request": "later", "answer": ""}) + "\n")
    assert f"{log} has no line of req-aaaa" in groups(run_dir, "show", "aaaa", "--request-log", str(log))
    (tmp_path / "requests.jsonl.1").write_text("")
    entry = {"request_id": "req-aaaa", "request": "earlier", "answer": ""}
    (tmp_path / "requests.jsonl.2").write_text(json.dumps(entry) + "\n")
    told = json.loads(groups(run_dir, "show", "aaaa", "--request-log", str(log), "--json"))
    assert told["prompt"] == '"earlier"'


def test_a_request_log_is_read_whatever_separates_lines_of_text_in_it(run_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    cut = '{"request_id": "req-aaaa", "request": {"asks'
    whole = {"request_id": "req-aaaa", "request": "one\u2028two\x85three", "answer": "four"}
    log.write_text(f"{cut}\n{json.dumps(whole, ensure_ascii=False)}\n", encoding="utf-8")
    told = json.loads(groups(run_dir, "show", "aaaa", "--request-log", str(log), "--json"))
    assert json.loads(told["prompt"]) == whole["request"]


def test_a_run_that_is_over_is_read_in_its_folder(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    (here / "runs" / "default").symlink_to(run_dir)
    monkeypatch.chdir(here)
    done = CliRunner().invoke(app, ["groups", "list", "--json"], catch_exceptions=False)
    assert done.stdout == groups(run_dir, "list", "--json")


def test_an_unknown_group_is_said(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="none of the latest groups begins with 'zz'"):
        groups(run_dir, "show", "zz")


def test_a_run_folder_and_the_address_of_another_server_are_refused_together(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="name a run folder or the address of a server, not both"):
        groups(run_dir, "list", "--swarm-url", "http://127.0.0.1:1")


def test_a_histogram_of_a_step_that_was_done_again_is_of_its_last_time(tmp_path: Path) -> None:
    async def fill() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        journal.append(RunRow("r", "model: tiny\n"))
        for batch_id, step, reward in (("x", 1, 0.0), ("lost", 2, 0.25), ("y", 2, 1.0)):
            names = [f"{batch_id}{number}" for number in (1, 2)]
            one, output = batch(batch_id, task=names), said(batch_id, 1, reward)
            journal.append(*(claimed(name, run_id="r") for name in names))
            journal.append(*(ended(name, "task", output=output) for name in names), *taken(one), *stepped(one, step))
        await journal.close()

    asyncio.run(fill())
    rewards = json.loads(groups(tmp_path, "list", "--json"))["rewards"]
    assert [(one["step"], one["counts"][0], one["counts"][-1], sum(one["counts"])) for one in rewards] == [
        (1, 2, 0, 2),
        (2, 0, 2, 2),
    ]
    # the scale is that of all steps: no reward of step 2 is 0
    table = groups(tmp_path, "list")
    assert "lowest" not in table and "step   from" in table


def test_a_histogram_has_every_reward_in_one_bin() -> None:
    counts = histogram(1, [0.5, 0.55, 1.0, 1.5, 1.5], 0.5, 1.5).counts
    assert (len(counts), sum(counts), counts[0], counts[-1]) == (BINS, 5, 2, 2)
    assert histogram(1, [0.3, 0.3], 0.3, 0.3).counts[0] == 2
    assert bars([0, 1, 8]) == " ▁█"
