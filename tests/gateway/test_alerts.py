"""The example rules of docs/alerts.yml name metrics that the two servers have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from swarm.types import StepResult
from tests.gateway.conftest import ask, gateway_before
from tests.swarm.server import conftest as server

pytestmark = pytest.mark.anyio
overrides, rig = server.overrides, server.rig
HOOK = """
def on_compute_relative_reward(task, candidates, context):
    return [] if "fail" in task.main_query else [0.0, 1.0]
"""
RULES: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docs" / "alerts.yml").read_text())
EXPRESSIONS: list[str] = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
_SELECTOR = re.compile(r"\b((?:swarm|gateway)_\w+)(?:\{([^}]*)\})?")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_rule_that_relates_series_of_other_labels_says_which_count(expression: str) -> None:
    """Prometheus relates series whose labels are all equal, and others not at all: such a rule never fires."""
    related = {(name, selector) for name, selector in _SELECTOR.findall(expression)}
    same = len(related) == 1 or all("=" not in selector for _, selector in related)
    assert same or "ignoring(" in expression or "on()" in expression


@pytest.mark.parametrize("expression", [each for each in EXPRESSIONS if "0.9 *" in each])
def test_a_share_of_a_reward_is_taken_of_positive_ones_alone(expression: str) -> None:
    assert "> 0" in expression


async def test_each_metric_of_the_rules_exists_with_its_labels(rig: server.Rig, tmp_path: Path) -> None:
    for task, reward in (("a", 0.0), ("a", 1.0), ("b", 0.5), ("b", 0.5)):
        episode = await rig.claim(throttle_policy={"current_task_id": task})
        await episode.chat()
        await episode.end(task, reward)
    batch = await rig.controller.next_batch()
    rig.controller.step_done(StepResult(step=1, batch_id=batch.batch_id, metrics={}, seconds=3.0))
    rig.controller.rollout_ready(server.ready(rig.vllm_address, 1, batch.batch_id))
    tried = await rig.claim(episode_type="eval")
    await tried.chat()
    await tried.end("held out", 0.75)
    known: dict[str, set[str]] = {}
    async with gateway_before(str(rig.client.base_url), tmp_path, reward=HOOK) as http:
        for asked in ("work", "fail"):
            await ask(http, model=rig.controller.job.model_name, messages=[{"role": "user", "content": asked}])
        for text in ((await http.get("/metrics")).text, (await rig.client.get("/metrics")).text):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    known.setdefault(sample.name, set()).update(sample.labels)
    assert len(EXPRESSIONS) >= 8
    for expression in EXPRESSIONS:
        for name, selector in _SELECTOR.findall(expression):
            assert name in known, expression
            assert set(re.findall(r"(\w+)=", selector)) <= known[name], expression
