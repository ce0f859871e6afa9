"""``replay``: what goes together, and a comparison by a hook of one's own without any gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from gateway.cli.root import app
from swarm.errors import ConfigError
from tests.gateway.conftest import write_hooks
from tests.standins.vllm import listening

RANKS = """
def on_compute_relative_reward(task, candidates, context):
    order = sorted(range(len(candidates)), key=lambda index: candidates[index].completion_tokens)
    return [order.index(index) / len(order) for index in range(len(candidates))]
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hooks", "x"], "--hooks and --no-train go together"),
        (["--no-train"], "--hooks and --no-train go together"),
        (["--no-train", "--hooks", "x", "--steps", "3"], "leave out --command and --steps"),
        (["--no-train", "--hooks", "x", "--command", "app {question}"], "leave out --command and --steps"),
        (["--command", "app {question}", "--max-tokens", "9"], "leave out --max-tokens"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["replay", "--data", "none.jsonl", *options], catch_exceptions=False)


def test_a_report_without_scores_is_nothing_to_compare_with(tmp_path: Path) -> None:
    with plain_vllm(3) as url:
        data = held_out(tmp_path)
        said = run(data, url, "--label", "trained", "--report", str(tmp_path / "trained"), "--json")
        assert json.loads(said)["scores"] == []
        with pytest.raises(ConfigError, match="trained is no report of `replay --no-train`"):
            run(data, url, "--no-train", "--hooks", "concise", "--compare", str(tmp_path / "trained"))


def test_two_plain_servers_are_compared_by_a_hook_that_ranks(tmp_path: Path) -> None:
    data, hooks = held_out(tmp_path), str(write_hooks(tmp_path / "hooks", RANKS))
    with plain_vllm(3) as base, plain_vllm(5) as trained:
        before = str(tmp_path / "before")
        run(data, base, "--no-train", "--hooks", hooks, "--report", before, "--label", "base", "--epochs", "2")
        said = run(data, trained, "--no-train", "--hooks", hooks, "--compare", before, "--epochs", "2")
    assert "mean reward on 9 prompts of both: 0.625, base: 0.125" in said
    assert "better by 0.500 [0.500, 0.500] on 9 prompts" in said


def test_a_comparison_that_fails_loses_no_answers(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "another one?"}\n')
    hooks = str(write_hooks(tmp_path / "hooks", RANKS))
    with plain_vllm(3) as url:
        before = str(tmp_path / "before")
        run(held_out(tmp_path), url, "--no-train", "--hooks", hooks, "--report", before)
        after = tmp_path / "after"
        with pytest.raises(ConfigError, match="no prompt in common"):
            run(str(other), url, "--no-train", "--hooks", hooks, "--compare", before, "--report", str(after))
    assert len(json.loads((after / "report.json").read_text())["scores"][0]["answers"]) == 1


@pytest.mark.parametrize("command", ["replay", "policies eval 2"])
def test_a_report_that_cannot_be_written_is_told_before_anything_is_sent(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.replay.senders.HttpSender.send", pytest.fail)
    monkeypatch.setattr("gateway.cli.evaluate.run_folder", lambda _: pytest.fail("asked for the run"))
    taken = tmp_path / "report"
    taken.write_text("a file")
    options = ["--data", held_out(tmp_path), "--report", str(taken)]
    options += ["--model", "m"] if command == "replay" else ["--hooks", "concise"]
    with pytest.raises(ConfigError, match=f"cannot write the report to {taken}: File exists"):
        CliRunner().invoke(app, [*command.split(), *options], catch_exceptions=False)


@pytest.mark.parametrize("address", ["http://[::1", "http://127.0.0.1:99999/v1", "http:///v1"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match="must look like http"):
        CliRunner().invoke(app, ["replay", "--data", "x.jsonl", "--base-url", address], catch_exceptions=False)


def held_out(folder: Path) -> str:
    data = folder / "held_out.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{number}?"}) + "\n" for number in range(9)))
    return str(data)


def run(data: str, url: str, *options: str) -> str:
    command = ["replay", "--data", data, "--base-url", f"{url}/v1", "--model", "m", *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@contextmanager
def plain_vllm(tokens: int) -> Generator[str]:
    """A server of answers of so many tokens, in a thread; each request says that it is not to be trained."""

    async def answer(request: Request) -> JSONResponse:
        message = {"role": "assistant", "content": "word " * tokens}
        return JSONResponse({"choices": [{"message": message}], "usage": {"completion_tokens": tokens}})

    started, over = threading.Event(), threading.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        async with listening(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as url:
            started.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield url
    finally:
        over.set()
        thread.join(30)
