"""Proposers: what they propose, what is refused, and how their failures are told."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.importer import SourceFolder
from swarm.research.ledger import BASE, Run, State, fold
from swarm.research.proposing import Proposal, ProposerError, propose, pruned
from tests.swarm.research.making import study_of
from tests.swarm.research.test_decisions import begun, claimed, ended, measured, proposed

TUTORIAL = Path(__file__).parents[3] / "tutorial" / "opencode_build_research"


def state_of(*proposals: Proposal) -> State:
    events = [begun(), claimed(BASE), measured(BASE, 4, [0.5, 0.6]), ended(BASE)]
    for place, one in enumerate(proposals, 1):
        events.append({**proposed(f"e{place}"), "delta": one.set})
    return fold(events)


def all_of(proposer: dict[str, Any], folder: Path) -> list[Proposal]:
    """Everything that it proposes."""
    study, found = study_of(proposer=proposer), list[Proposal]()
    while not (told := propose(study, folder, folder, state_of(*found))).is_last:
        found.append(told)
        assert len(found) < 50
    return found


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    grid = {"kind": "grid", "space": {"lr": [1e-6, 1e-5], "settings.weight": [0, 1, 2]}}
    deltas = [one.set for one in all_of(grid, tmp_path)]
    assert len(deltas) == 6 and deltas[0] == {"lr": 1e-6, "settings.weight": 0}
    assert len({json.dumps(one) for one in deltas}) == 6


def test_draws_are_the_same_after_a_kill(tmp_path: Path) -> None:
    space = {"lr": {"low": 1e-6, "high": 1e-3, "log": True}, "kl_coef": {"low": 0, "high": 1}}
    drawn = {"kind": "random", "count": 20, "space": space}
    first = all_of(drawn, tmp_path)
    assert first == all_of(drawn, tmp_path) and len(first) == 20
    assert all(1e-6 <= one.set["lr"] <= 1e-3 and 0 <= one.set["kl_coef"] <= 1 for one in first)
    assert sum(one.set["lr"] < 3e-5 for one in first) in range(4, 17), "even in the logarithm"


def test_what_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef next_one(state):\n    return {'set': {'lr': np.float32(1e-5)}}\n"
    )
    with pytest.raises(ProposerError, match="cannot be written as JSON"):
        all_of({"kind": "function", "function": "mine:next_one"}, tmp_path)


def test_a_function_may_give_what_python_writes_as_json(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def next_one(state):\n"
        "    return None if state['experiments'] else {'set': {'settings.weights': (0.9, 0.95)}}\n"
    )
    [proposal] = all_of({"kind": "function", "function": "mine:next_one"}, tmp_path)
    assert json.loads(json.dumps(proposal.set)) == {"settings.weights": [0.9, 0.95]}


def test_a_function_gets_the_state(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def next_one(state):\n"
        "    n = len(state['experiments'])\n"
        "    assert state['base']['scores'] == {4: 0.55}\n"
        "    return {'hypothesis': 'more', 'set': {'lr': 1e-6 * (n + 2)}} if n < 2 else None\n"
        "def broken(state):\n    raise RuntimeError('no idea')\n"
        "def wrong(state):\n    return {'sett': {}}\n"
    )
    found = all_of({"kind": "function", "function": "mine:next_one"}, tmp_path)
    assert [one.set["lr"] for one in found] == [2e-6, 3e-6]
    for name, message in {"broken": "mine:broken failed: RuntimeError: no idea", "wrong": "sett"}.items():
        with pytest.raises(ProposerError, match=message):
            all_of({"kind": "function", "function": f"mine:{name}"}, tmp_path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('no key')", "ended with 1: no key"),
        ("print('hello')", "printed no JSON"),
        ("print('[]')", "what .* printed"),
        ("import time; time.sleep(60)", "took longer than 0.3 s"),
    ],
)
def test_a_command_that_fails_says_why(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(ProposerError, match=message):
        all_of(
            {
                "kind": "command",
                "command": [sys.executable, "-S", "-c", script],
                "seconds": 0.3 if "sleep" in script else 30,
            },
            tmp_path,
        )


def test_a_command_reads_the_state_and_prints_a_proposal(tmp_path: Path) -> None:
    script = (
        "import json, sys; n = len(json.load(sys.stdin)['experiments'])\n"
        "print(json.dumps({'set': {'lr': (n + 1) / 1e6}} if n < 1 else {'done': 'enough'}))"
    )
    command = {"kind": "command", "command": [sys.executable, "-S", "-c", script]}
    assert [one.set for one in all_of(command, tmp_path)] == [{"lr": 1e-6}]
    with pytest.raises(ProposerError, match="no-such-command cannot be run"):
        all_of({"kind": "command", "command": ["no-such-command"]}, tmp_path)


def test_the_models_answer_is_read_between_words() -> None:
    script = SourceFolder(TUTORIAL).module("propose")
    answer = 'Sure!\n```json\n{"hypothesis": "faster", "set": {"lr": 3e-5}, "confidence": 1}\n```'
    assert script.proposal_of(answer) == {"hypothesis": "faster", "set": {"lr": 3e-5}}
    with pytest.raises(ValueError, match="without JSON"):
        script.proposal_of("I do not know")


HALVING = {
    "kind": "halving",
    "count": 6,
    "space": {"lr": {"low": 1e-6, "high": 1e-3, "log": True}, "advantage": ["grpo", "rloo"]},
}
needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")


def test_halving_without_optuna_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"needs optuna: pip install '\.\[research\]' in a clone"):
        all_of(HALVING, tmp_path)


@needs_optuna
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_halving_draws_the_same_after_a_kill(tmp_path: Path, sampler: str) -> None:
    first = all_of({**HALVING, "sampler": sampler}, tmp_path)
    assert len(first) == 6 and first == all_of({**HALVING, "sampler": sampler}, tmp_path)
    assert all(1e-6 <= one.set["lr"] <= 1e-3 and one.set["advantage"] in ("grpo", "rloo") for one in first)


@needs_optuna
def test_halving_draws_with_any_seed_of_a_study(tmp_path: Path) -> None:
    study = study_of(proposer=HALVING, seed=2**31 - 1)
    assert set(propose(study, tmp_path, tmp_path, state_of()).set) == {"lr", "advantage"}


@needs_optuna
@pytest.mark.parametrize("goal", ["maximize", "minimize"])
def test_halving_ends_what_is_not_among_the_best(tmp_path: Path, goal: str) -> None:
    evaluator = {"workflow": "evaluate:score", "tasks": "held_out.jsonl", "every_steps": 1, "goal": goal}
    study = study_of(proposer={**HALVING, "keep": 2}, evaluator=evaluator)
    sign = 1 if goal == "maximize" else -1
    events = [begun(), claimed(BASE), measured(BASE, 4, [0.5] * 6), ended(BASE)]
    for place, one in enumerate(all_of(HALVING, tmp_path), 1):
        events += [{**proposed(f"e{place}"), "delta": one.set}]
    for place, level in enumerate([0.5, 0.6, 0.4, 0.7], 1):
        name = f"e{place}"
        events += [claimed(name), measured(name, 1, [sign * level] * 6)]
        told = pruned(study, fold(events), Run(name))
        assert (told is None) == (level in (0.5, 0.6, 0.7)), (name, told)
        events.append(ended(name, "done" if told is None else told.outcome))
    assert pruned(study, fold([*events, claimed("e5")]), Run("e5")) is None, "nothing is measured yet"
