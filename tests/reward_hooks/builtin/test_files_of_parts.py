"""Files that blend built-in rewards with others, and what is wrong in such a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reward_hooks import Task, load_hooks
from reward_hooks.runner import HookRunner
from swarm.errors import ConfigError
from tests.reward_hooks.making import CONTEXT, candidates

pytestmark = pytest.mark.anyio
TASK = Task(task_id="t")


YAML = """
parts:
  - {hook: json, options: {keys: [answer]}, gate: 1.0}
  - {hook: "reward_hooks.builtin.rules.text:Length", options: {at_most: 4, unit: words}, weight: 3}
  - {hook: mine, scale: rank}
submit: mine
"""


async def test_a_file_blends_names_attributes_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "on_compute_relative_reward.py").write_text(
        "def on_compute_relative_reward(task, candidates, context):\n    return [len(one.text) for one in candidates]\n"
    )
    (mine / "on_user_submit_new_requests.py").write_text(
        "def on_user_submit_new_requests(request, context):\n    return [request.body]\n"
    )
    (tmp_path / "hooks.yaml").write_text(YAML)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home.yaml").write_text(YAML.replace("mine", "~/mine"))
    for spec in (tmp_path, tmp_path / "hooks.yaml", tmp_path / "home.yaml"):
        hooks = load_hooks(spec)
        assert hooks.submit is not None
        score = await HookRunner(hooks).score(TASK, candidates('{"answer": 1}', '{"answer":  12}', "no"), CONTEXT)
        assert score.values == pytest.approx([0.75, 1.0, 0.0])
        assert set(score.rewards[0].components) == {"json", "length", "length.words", "mine"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- json", "must be a mapping"),
        ("parts: [", "is not valid YAML"),
        ("parts: []", "parts"),
        ("parts: [{hook: json, gate: 1}]", "all parts are gates"),
        ("parts: [{hook: json, gate: 1, weight: 2}, {hook: repetition}]", "a gate has no weight"),
        ("parts: [{hook: json}, {hook: json}]", "share the name json"),
        ("parts: [{hook: json, wieght: 2}]", "unknown key 'wieght'"),
        ("parts: [{hook: nothing}]", "there is no hook folder or hook named 'nothing'; the names are: "),
        ("parts: [{hook: json, weight: 0}]", "greater than 0"),
        ("parts: [{hook: length}]", "cannot be made with the options {}"),
        ("parts: [{hook: length, options: {at_most: -1}}]", "Length needs"),
        ("parts: [{hook: json, options: {keys: answer}}]", "Json needs a list of keys, not a string"),
        ("parts: [{hook: json}]\nsubmit: json", "submit: json defines no on_user_submit_new_requests"),
        ("parts: [{hook: json}]\nsession_end: json", "session_end: json defines no on_session_end"),
        ("parts: [{hook: hooks.yaml}]", "names itself"),
        ("parts: [{hook: .}]", "names itself"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hooks.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_hooks(tmp_path / "hooks.yaml")
    assert said in caught.value.message
    assert str(tmp_path) in caught.value.message
