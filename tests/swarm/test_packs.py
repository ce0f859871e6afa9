"""What is found where a pack is installed, and where it is not."""

from __future__ import annotations

import pytest

from swarm.errors import ConfigError
from swarm.packs import load_optional


@pytest.mark.parametrize("module", ["swarm.no_such_module", "swarm.no_such_package.module", "no_such_package.module"])
def test_a_pack_that_is_not_installed_adds_nothing(module: str) -> None:
    assert load_optional(f"{module}:anything") is None


def test_a_pack_that_is_installed_and_broken_is_an_error() -> None:
    assert load_optional("swarm.packs:load_optional") is load_optional
    with pytest.raises(ConfigError, match="has no attribute 'nothing'"):
        load_optional("swarm.packs:nothing")
