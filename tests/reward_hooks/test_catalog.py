"""Names of hooks: built-in ones load, installed ones are found, ambiguity is an error."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from reward_hooks import load_hooks
from reward_hooks.builtin.rules import Concise
from reward_hooks.loader import BUILT_IN, ENTRY_POINT_GROUP, find_hook
from swarm.errors import ConfigError

MADE = Concise()
HOOK = "class Mine:\n    def on_compute_relative_reward(self, task, candidates, context):\n        return [1.0]\n"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, distribution: str = "other") -> None:
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = hooks_of_{distribution}:Mine\n")
    (folder / f"hooks_of_{distribution}.py").write_text(HOOK)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


@pytest.mark.parametrize(("name", "place"), BUILT_IN.items(), ids=BUILT_IN)
def test_built_in_names_lead_to_documented_hooks(name: str, place: str) -> None:
    module, _, attribute = place.partition(":")
    assert getattr(importlib.import_module(module), attribute).__doc__
    # the judges are made in one place from their settings, and documented where they are
    documented = f"reward_hooks.judges.{name}" if module == "reward_hooks.judges" else module
    said = importlib.import_module(documented).__doc__ or ""
    assert re.search(r"fails when|failure mode", said, re.IGNORECASE), f"{documented} does not say when it fails"


def test_an_installed_package_adds_a_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "polite")
    assert find_hook("polite") == "hooks_of_other:Mine"
    assert load_hooks("polite").source == "polite"


def test_an_ambiguous_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "json")
    with pytest.raises(
        ConfigError, match=r"'json' stands for reward_hooks\.builtin\.rules\.format:Json and hooks_of_other:Mine"
    ):
        find_hook("json")


def test_options_go_to_what_makes_hooks_and_nothing_else(tmp_path: Path) -> None:
    assert load_hooks("length", {"at_most": 3}).source == "length"
    with pytest.raises(ConfigError, match="takes no options"):
        load_hooks("tests.reward_hooks.test_catalog:MADE", {"n": 3})
    with pytest.raises(ConfigError, match="takes no options"):
        load_hooks(tmp_path, {"n": 3})
    with pytest.raises(ConfigError, match="cannot be made with the options"):
        load_hooks("repetition", {"nn": 3})
