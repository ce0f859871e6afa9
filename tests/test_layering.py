"""The import table of the design, held against the sources; light packages load no torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "reward_hooks", "adapters", "gateway")
HEAVY = {"torch", "ray", "verl", "vllm", "tensordict", "transfer_queue", "transformers"}

#: The modules directly in swarm/ are the base; every layer may use them.
BASE = {"swarm"}
#: Layers that need nothing but the standard library and what the base needs.
BASE_ONLY = {"swarm", "swarm.credentials", "swarm.sync"}
#: layer -> our other layers it may import. The longest matching prefix of a module is its layer.
MAY_IMPORT: dict[str, set[str]] = {
    "swarm": set(),
    "swarm.http": set(),
    "swarm.credentials": set(),
    # token data is numpy's: beside the base, so that gateways and clients do without
    "swarm.tokens": set(),
    "swarm.link": {"swarm.tokens"},
    "swarm.tracker": {"swarm.tokens"},
    "swarm.sync": set(),
    "swarm.client": {"swarm.sync", "swarm.http"},
    "swarm.data": set(),
    "swarm.server": {
        "swarm.tokens",
        "swarm.link",
        "swarm.tracker",
        "swarm.http",
        "swarm.credentials",
        "swarm.sync",
        "adapters.dialects",
    },
    "reward_hooks": set(),
    "adapters": set(),
    "adapters.dialects": set(),
    "adapters.models": set(),
    "adapters.verl": {"swarm.tokens", "swarm.link", "adapters.models"},
    "gateway": {"swarm.client", "swarm.data", "swarm.http", "swarm.credentials", "reward_hooks", "adapters.dialects"},
}
MAY_IMPORT_HEAVY = {"adapters.verl", "adapters.models"}
THIRD_PARTY_OF_BASE = {"pydantic", "pydantic_core", "yaml"}


def layer_of(module: str) -> str:
    parts = module.split(".")
    return next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in MAY_IMPORT)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(module: str, imported: set[str]) -> list[str]:
    layer = layer_of(module)
    wrong: list[str] = []
    for name in imported:
        top = name.split(".")[0]
        if top in HEAVY and layer not in MAY_IMPORT_HEAVY:
            wrong.append(f"{module} imports {name}, only {sorted(MAY_IMPORT_HEAVY)} may")
        elif top in PACKAGES:
            target = layer_of(name)
            if target != layer and target not in BASE | MAY_IMPORT[layer]:
                wrong.append(f"{module} ({layer}) imports {name} ({target})")
        elif layer in BASE_ONLY and top not in THIRD_PARTY_OF_BASE and top not in sys.stdlib_module_names:
            wrong.append(f"{module} ({layer}) imports {name}, which is not in the standard library")
    return wrong


def test_imports_follow_the_table() -> None:
    assert [wrong for path in sources() for wrong in violations(module_of(path), imports_of(path))] == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("gateway.app", "swarm.server.app"),
        ("gateway.app", "adapters.verl.config"),
        ("swarm.server.app", "reward_hooks.runner"),
        ("swarm.server.app", "gateway.app"),
        ("swarm.server.app", "adapters.verl.config"),
        ("reward_hooks.runner", "swarm.client"),
        ("swarm.link.server", "torch"),
        ("swarm.types", "starlette"),
        ("swarm.credentials.ring", "swarm.http.asgi"),
        ("swarm.sync.archive", "httpx"),
        ("swarm.sync.archive", "swarm.client"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, imported: str) -> None:
    assert violations(module, {imported})


def test_light_packages_load_no_torch() -> None:
    light = "gateway.app, gateway.cli, swarm.client, swarm.server.app, reward_hooks"
    probe = f"import sys, {light}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_tests_and_tutorials_are_imported_by_nothing() -> None:
    outside = {"tests", "tutorial", "benchmarks", "docs"}
    for path in sources():
        assert not outside & {name.split(".")[0] for name in imports_of(path)}, path
