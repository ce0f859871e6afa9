"""The import table of the design, held against the sources: layers, circles, private names, light start-up."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
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
    "swarm.link": {"swarm.tokens", "swarm.sync"},
    "swarm.tracker": {"swarm.tokens"},
    "swarm.sync": set(),
    "swarm.client": {"swarm.sync", "swarm.http"},
    "swarm.data": set(),
    "swarm.research": {"swarm.client", "swarm.sync", "swarm.data"},
    "swarm.server": {
        "swarm.tokens",
        "swarm.link",
        "swarm.tracker",
        "swarm.http",
        "swarm.credentials",
        "swarm.sync",
        "adapters.dialects",
    },
    "reward_hooks": {"swarm.http"},
    "adapters": set(),
    "adapters.dialects": set(),
    "adapters.models": set(),
    "adapters.verl": {"swarm.tokens", "swarm.link", "adapters.models"},
    "gateway": {
        "swarm.client",
        "swarm.sync",
        "swarm.data",
        "swarm.research",
        "swarm.http",
        "swarm.credentials",
        "reward_hooks",
        "adapters.dialects",
    },
}
MAY_IMPORT_HEAVY = {"adapters.verl", "adapters.models"}
THIRD_PARTY_OF_BASE = {"pydantic", "pydantic_core", "yaml"}
#: Packages whose own modules are layers of their own: a circle may not pass through them one by one.
LOOSE = {"swarm", "swarm.server", "gateway", "reward_hooks", "adapters"}
#: Names with an underscore that their owners document as public.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every product module by its dotted name."""
    found: dict[str, ast.Module] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module; to walk it takes longer than all checks."""
    return list(ast.walk(tree))


@cache
def imports_of(tree: ast.Module) -> set[str]:
    """Dotted names that a module imports, at any depth, also under ``TYPE_CHECKING``."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> str:
    parts = module.split(".")
    return next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in MAY_IMPORT)


def violations(module: str, imported: Iterable[str]) -> list[str]:
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
        elif top in {"tests", "tutorial", "benchmarks", "docs"}:
            wrong.append(f"{module} imports {name}, which is not part of the product")
        elif layer in BASE_ONLY and top not in THIRD_PARTY_OF_BASE and top not in sys.stdlib_module_names:
            wrong.append(f"{module} ({layer}) imports {name}, which is not in the standard library")
    return wrong


def test_imports_follow_the_table() -> None:
    assert [line for name, tree in modules().items() for line in violations(name, imports_of(tree))] == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("gateway.app", "swarm.server.app"),
        ("gateway.app", "adapters.verl.config"),
        ("swarm.server.app", "reward_hooks.runner"),
        ("swarm.server.app", "gateway.app"),
        ("swarm.server.app", "adapters.verl.config"),
        ("swarm.server.app", "tests.standins"),
        ("reward_hooks.runner", "swarm.client"),
        ("swarm.link.server", "torch"),
        ("swarm.types", "starlette"),
        ("swarm.credentials", "swarm.http.serve"),
        ("swarm.sync.archive", "httpx"),
        ("swarm.sync.archive", "swarm.client"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, imported: str) -> None:
    assert violations(module, {imported})


@cache
def file_graph() -> dict[str, set[str]]:
    """module -> our modules that it imports."""
    graph: dict[str, set[str]] = {}
    for module, tree in modules().items():
        # `from package import name` imports the module `package.name`, or a name of `package`
        named = {name if name in modules() else name.rpartition(".")[0] for name in imports_of(tree)}
        graph[module] = {name for name in named if name in modules() and name != module}
    return graph


def package_graph(files: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same by package; a module directly in one of ``LOOSE`` stands for itself."""

    def node(module: str) -> str:
        parts = module.split(".")
        depth = 3 if module.startswith("swarm.server.") else 2
        return module if module.rpartition(".")[0] in LOOSE else ".".join(parts[:depth])

    graph: dict[str, set[str]] = {}
    for module, imported in files.items():
        graph.setdefault(node(module), set()).update(node(name) for name in imported if node(name) != node(module))
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of ``graph``, each node imported by the next; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return exc.args[1]
    return []


def test_no_circle_of_files() -> None:
    assert circle(file_graph()) == []


def test_no_circle_of_packages() -> None:
    assert circle(package_graph(file_graph())) == []


def test_a_circle_is_reported() -> None:
    files = {"gateway.api.a": {"gateway.limits.b"}, "gateway.limits.c": {"gateway.api.d"}}
    assert circle(files) == []
    assert circle(package_graph(files)) != []


def private_names(tree: ast.Module, ours: set[str]) -> list[str]:
    """Names with a leading underscore that belong to somebody else."""
    found: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in PACKAGES:
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [f"{node.module}: {part}" for part in parts if part.startswith("_") and part != "__future__"]
        elif isinstance(node, ast.Attribute) and node.attr not in ours:
            found += [ast.unparse(node)] if node.attr.startswith("_") and not node.attr.startswith("__") else []
    return found


def names_of(tree: ast.Module) -> set[str]:
    """Names that a module defines or assigns, attributes included."""
    found: set[str] = set(DOCUMENTED)
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def test_no_private_name_of_a_dependency_outside_the_verl_adapter() -> None:
    ours = set[str]().union(*(names_of(tree) for tree in modules().values()))
    product = {name: tree for name, tree in modules().items() if layer_of(name) != "adapters.verl"}
    assert {name: found for name, tree in product.items() if (found := private_names(tree, ours))} == {}


def test_a_private_name_is_reported() -> None:
    tree = ast.parse("import uvicorn._types\nfrom uvicorn import _types\napp._router\nself._own = 1\nself._own")
    assert private_names(tree, names_of(tree)) == ["uvicorn: _types", "app._router"]


def test_light_packages_load_no_torch() -> None:
    probe = "import sys, gateway.app, gateway.cli, swarm.client, swarm.server.app, reward_hooks; "
    probe += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
