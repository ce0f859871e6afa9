"""Loading hooks: folders, module:attribute, and every way in which they can be wrong."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from reward_hooks import HookContext, Hooks, Task, load_hooks
from reward_hooks.contract import REWARD, SUBMIT
from swarm.errors import ConfigError
from tests.reward_hooks.making import Longer

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


#: Asks two helpers for rewards: one imported with the hook, one when it is called.
ASKS_HELPERS = """
import helper
from parts.early import REWARD
def on_compute_relative_reward(task, candidates, context):
    import late
    from parts import inner
    return [REWARD, late.REWARD, helper.PARTS.early.REWARD, inner.ALSO]
"""


def write_helpers(path: Path, reward: float) -> Path:
    """Helpers of every form beside a hook: files, a package, a folder without ``__init__.py``."""
    (path / "parts").mkdir(parents=True, exist_ok=True)
    (path / "plain").mkdir(exist_ok=True)
    (path / "plain" / "number.py").write_text(f"REWARD = {reward}\n")
    (path / "parts" / "__init__.py").touch()
    (path / "parts" / "early.py").write_text("from plain.number import REWARD\n")
    (path / "parts" / "inner.py").write_text("from .early import REWARD as ALSO\n")
    (path / "late.py").write_text(f"REWARD = {reward}\n")
    (path / "helper.py").write_text("import parts.early\nPARTS = parts\n")
    return folder(path, ASKS_HELPERS)


def rewards_of(hooks: Hooks) -> object:
    return hooks.reward(Task(task_id="t"), [], HookContext(num_repeat=2))


def test_a_hook_imports_files_beside_it_at_load_and_when_called(tmp_path: Path) -> None:
    path, modules = [*sys.path], {*sys.modules}
    assert rewards_of(load_hooks(write_helpers(tmp_path, 0.25))) == [0.25] * 4
    assert sys.path == path and not {"helper", "late", "parts", "plain"} & ({*sys.modules} - modules)


def test_loading_again_takes_changed_helpers_and_leaves_the_old_hooks_as_they_were(tmp_path: Path) -> None:
    old = load_hooks(write_helpers(tmp_path, 0.25))
    assert rewards_of(old) == [0.25] * 4
    # as long as before, within the same second
    new = load_hooks(write_helpers(tmp_path, 0.75))
    assert rewards_of(new) == [0.75] * 4
    assert rewards_of(old) == [0.25] * 4


def test_helpers_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    hooks = [load_hooks(write_helpers(tmp_path / str(reward), reward)) for reward in (0.25, 0.75)]
    assert [rewards_of(one) for one in hooks] == [[0.25] * 4, [0.75] * 4]


def test_replaced_hooks_are_freed(tmp_path: Path) -> None:
    write_helpers(tmp_path, 0.25)
    # what earlier tests left is none of this one's
    gc.collect()
    before = {*sys.modules}
    hooks = load_hooks(tmp_path)
    assert {*sys.modules} - before
    del hooks
    gc.collect()
    assert {*sys.modules} == before


def test_a_function_may_load_the_hooks_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = write_helpers(tmp_path, 0.5)
    monkeypatch.setitem(sys.modules, "mine_of_test", SimpleNamespace(make=lambda: load_hooks(hooks)))
    loaded = load_hooks("mine_of_test:make")
    gc.collect()
    assert rewards_of(loaded) == [0.5] * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef f(:\n", "late.py, line 2: invalid syntax"),
        ("x = 1\nraise ValueError('no')\n", "late.py, line 2, failed on import: ValueError: no"),
        ("import no_such_module_at_all\n", "late.py, line 1, failed on import: ModuleNotFoundError: No module named"),
    ],
)
def test_the_error_of_a_wrong_helper_has_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    before = {*sys.modules}
    folder(tmp_path, f"import late\n{GOOD}")
    (tmp_path / "late.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_hooks(tmp_path)
    assert f"{tmp_path}/{said}" in caught.value.message
    assert {*sys.modules} == before


def test_a_hook_may_be_a_callable_object(tmp_path: Path) -> None:
    text = "from tests.reward_hooks.making import Longer\non_compute_relative_reward = Longer(20)\n"
    assert load_hooks(folder(tmp_path, text)).reward == Longer(20)


def test_the_digest_is_of_what_was_loaded(tmp_path: Path) -> None:
    codes = [load_hooks(write_helpers(tmp_path / name, reward)).code for name, reward in (("a", 0.1), ("b", 0.1))]
    assert codes[0] == codes[1] != "", "the place does not count"
    (tmp_path / "a" / "notes.txt").write_text("no code")
    (tmp_path / "a" / "unused.py").write_text("nobody imports this")
    old = load_hooks(tmp_path / "a")
    assert old.code == codes[0]
    assert load_hooks(write_helpers(tmp_path / "a", 0.2)).code != codes[0], "a helper changed"
    assert old.code == codes[0]


def test_the_digest_holds_the_file_of_a_judge(tmp_path: Path) -> None:
    (tmp_path / "judge.yaml").write_text("kind: pointwise\nendpoint: {base_url: 'http://judge/v1'}\n")
    (tmp_path / f"{REWARD}.py").write_text(
        "from pathlib import Path\nfrom reward_hooks.judges import load_judge\n"
        f"{REWARD} = load_judge(Path(__file__).with_name('judge.yaml'))\n"
    )
    first = load_hooks(tmp_path)
    assert load_hooks(tmp_path).code == first.code
    with (tmp_path / "judge.yaml").open("a") as file:
        file.write("rubric: Be short.\n")
    assert load_hooks(tmp_path).code != first.code


def test_the_digest_of_a_module_stays_while_its_old_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "hooks_of_the_digest_test.py"
    file.write_text(GOOD + "import sys\nhooks = sys.modules[__name__]\n")
    first = load_hooks("hooks_of_the_digest_test:hooks")
    file.write_text(file.read_text() + "# changed, which needs a restart\n")
    assert load_hooks("hooks_of_the_digest_test:hooks").code == first.code != ""


def test_a_hooks_object_is_returned_with_the_digest_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = Hooks(Longer(20))
    monkeypatch.setattr("tests.reward_hooks.test_loader.HELD", SimpleNamespace(hooks=hooks), raising=False)
    loaded = load_hooks("tests.reward_hooks.test_loader:HELD.hooks")
    assert replace(loaded, code="") == hooks and loaded.code


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
def test_the_error_of_a_wrong_folder_has_file_line_and_remedy(tmp_path: Path, reward: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks(folder(tmp_path, reward))
    assert said in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_the_optional_file_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{SUBMIT}\.py, line 1: .*define `def {SUBMIT}\(request, context\)`"):
        load_hooks(folder(tmp_path, submit=f"def {SUBMIT}(request):\n    ...\n"))


def leave() -> None:
    sys.exit("set JUDGE_KEY")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no/such/folder", "there is no hook folder no/such/folder"),
        ("nothing_here", "there is no hook folder or hook named 'nothing_here'"),
        ("no_such_module_at_all:hooks", "cannot import 'no_such_module_at_all'"),
        ("tests.reward_hooks.making:none", "has no attribute 'none'"),
        ("tests.reward_hooks.making:Longer", "cannot be made with the options {}"),
        ("tests.reward_hooks.test_loader:leave", "failed to be made: SystemExit: set JUDGE_KEY"),
        ("no/such.yaml", "there is no hook folder no/such.yaml"),
        ("tests.reward_hooks:making", f"defines no {REWARD}"),
    ],
)
def test_a_wrong_name_is_refused(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks(spec)
    assert said in caught.value.message


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        load_hooks(tmp_path / f"{REWARD}.py")
