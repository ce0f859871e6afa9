"""Loading hooks: folders, module:attribute, and every way in which they can be wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from reward_hooks import HookContext, Hooks, Task, load_hooks
from reward_hooks.contract import REWARD, SUBMIT
from reward_hooks.rules import Concise, Repetition, Weighted
from swarm.errors import ConfigError

GOOD = "def on_compute_relative_reward(task, candidates, context):\n    return [1.0 for _ in candidates]\n"
GOOD_SUBMIT = "async def on_user_submit_new_requests(request, context):\n    return [request.body]\n"


def folder(path: Path, reward: str | None = GOOD, submit: str | None = None) -> Path:
    if reward is not None:
        (path / f"{REWARD}.py").write_text(reward)
    if submit is not None:
        (path / f"{SUBMIT}.py").write_text(submit)
    return path


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    hooks = load_hooks(folder(tmp_path))
    assert hooks.reward.__name__ == REWARD
    assert hooks.submit is None
    assert hooks.source == str(tmp_path)


def test_a_folder_with_both_files(tmp_path: Path) -> None:
    hooks = load_hooks(str(folder(tmp_path, submit=GOOD_SUBMIT)))
    assert hooks.submit is not None
    assert hooks.submit.__name__ == SUBMIT


def test_two_folders_do_not_share_their_modules(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = load_hooks(folder(one, "X = 1\n" + GOOD))
    second = load_hooks(folder(two, "X = 2\n" + GOOD))
    assert first.reward.__globals__["X"] != second.reward.__globals__["X"]


def test_a_hook_imports_files_beside_it_at_load_and_when_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "sibling_of_the_hook.py").write_text("REWARD = 0.25\n")
    (tmp_path / "another_sibling_of_the_hook.py").write_text("REWARD = 0.75\n")
    text = (
        "from sibling_of_the_hook import REWARD\n"
        "def on_compute_relative_reward(task, candidates, context):\n"
        "    import another_sibling_of_the_hook\n"
        "    return [REWARD, another_sibling_of_the_hook.REWARD]\n"
    )
    hooks = load_hooks(folder(tmp_path, text))
    assert hooks.reward(Task(task_id="t"), [], HookContext(num_repeat=2)) == [0.25, 0.75]
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1


def test_a_hook_may_be_a_callable_object(tmp_path: Path) -> None:
    text = "from reward_hooks.rules import Concise\non_compute_relative_reward = Concise(20, 60)\n"
    assert load_hooks(folder(tmp_path, text)).reward == Concise(20, 60)


@pytest.mark.parametrize("name", ["concise", "format", "repetition"])
def test_built_in_rules_load_by_name(name: str) -> None:
    spec = f"reward_hooks.rules.{name}:hooks"
    assert load_hooks(spec).source == spec


def test_a_hooks_value_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = Hooks(Weighted((Repetition(), 1.0)))
    monkeypatch.setattr("tests.reward_hooks.test_loader.HELD", SimpleNamespace(hooks=hooks), raising=False)
    assert load_hooks("tests.reward_hooks.test_loader:HELD.hooks") is hooks


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (None, f"holds no {REWARD}.py; add one that defines `def {REWARD}(task, candidates, context)`"),
        ("x = 1\ndef f(:\n", f"{REWARD}.py, line 2: "),
        ("x = 1\n\nraise ValueError('broken')\n", f"{REWARD}.py, line 3, failed on import: ValueError: broken"),
        ("import sys\nsys.exit(3)\n", f"{REWARD}.py, line 2, failed on import: SystemExit: 3"),
        ("x = 1\n", f"{REWARD}.py: defines no {REWARD}; add `def {REWARD}(task, candidates, context)`"),
        (f"{REWARD} = 0.5\n", f"{REWARD} is a float, not a function"),
        (f"\n\ndef {REWARD}(answers):\n    ...\n", f"{REWARD}.py, line 3: {REWARD}(answers) has the wrong parameters"),
        (f"def {REWARD}(task, candidates, context, *, k):\n    ...\n", "has the wrong parameters"),
    ],
)
def test_a_wrong_folder_is_told_with_file_line_and_cure(tmp_path: Path, reward: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks(folder(tmp_path, reward))
    assert said in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_the_optional_file_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{SUBMIT}\.py, line 1: .*define `def {SUBMIT}\(request, context\)`"):
        load_hooks(folder(tmp_path, submit=f"def {SUBMIT}(request):\n    ...\n"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no/such/folder", "there is no hook folder no/such/folder"),
        ("nothing_here", "there is no hook folder or hook named 'nothing_here'"),
        ("no_such_module_at_all:hooks", "cannot import 'no_such_module_at_all'"),
        ("reward_hooks.rules.concise:none", "has no attribute 'none'"),
        ("reward_hooks.rules.length:Length", "cannot be made with the options {}"),
        ("no/such.yaml", "there is no hook folder no/such.yaml"),
        ("reward_hooks.rules:concise", f"defines no {REWARD}"),
    ],
)
def test_a_wrong_name_is_told(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks(spec)
    assert said in caught.value.message


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    folder(tmp_path)
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        load_hooks(tmp_path / f"{REWARD}.py")
