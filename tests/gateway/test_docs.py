"""docs/gateway.md: every setting and every address is in it, and its examples are configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gateway.config.gateway import GatewayConfig, read_config
from gateway.config.route import RouteSettings
from gateway.rollout.policy import POLICY_HEADER, TRAIN_HEADER
from gateway.sessions.conversation import SESSION
from gateway.sessions.sessions import SESSION_END

TEXT = (Path(__file__).parent.parent.parent / "docs" / "gateway.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    "name",
    [*RouteSettings.model_fields, *GatewayConfig.model_fields, POLICY_HEADER, TRAIN_HEADER, SESSION, SESSION_END],
)
def test_every_setting_and_header_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_examples_are_configurations() -> None:
    assert len(EXAMPLES) >= 2
    routes = [read_config(yaml.safe_load(example)).route_names for example in EXAMPLES if "swarm_url" in example]
    assert routes == [["default"], ["planner", "coder", "other"]]
