"""The import table of the design, held against the sources: layers, circles, private names, light start-up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Self

import pytest

from tests.packs import PACKAGES, PACKS, ROOT, pack_of

HEAVY = {"torch", "ray", "verl", "vllm", "tensordict", "transfer_queue", "transformers"}

#: The modules directly in swarm/ are the base; every layer may use them.
BASE = {"swarm"}
#: Layers that need nothing but the standard library and what the base needs.
BASE_ONLY = {"swarm", "swarm.credentials", "swarm.code_snapshots"}
#: layer -> our other layers it may import. The longest matching prefix of a module is its layer.
MAY_IMPORT: dict[str, set[str]] = {
    "swarm": set(),
    "swarm.http": set(),
    "swarm.credentials": set(),
    # token data is numpy's: beside the base, so that gateways and clients do without
    "swarm.tokens": set(),
    "swarm.link": {"swarm.tokens", "swarm.code_snapshots"},
    "swarm.code_snapshots": set(),
    "swarm.client": {"swarm.code_snapshots", "swarm.http"},
    "swarm.data": set(),
    # the pack for AgentJet's users; its reader of job files needs less
    "swarm.agentjet": {"swarm.agentjet.yaml_job", "swarm.client", "swarm.data"},
    "swarm.agentjet.yaml_job": set(),
    "swarm.agentjet.compat": {"swarm.link", "swarm.server", "adapters.dialects"},
    "swarm.research": {"swarm.client", "swarm.code_snapshots", "swarm.data"},
    "swarm.server": {
        "swarm.tokens",
        "swarm.link",
        "swarm.http",
        "swarm.credentials",
        "swarm.code_snapshots",
        "adapters.dialects",
    },
    "reward_hooks": {"swarm.http"},
    "adapters": set(),
    "adapters.dialects": set(),
    "adapters.models": set(),
    "adapters.verl": {"swarm.tokens", "swarm.link", "adapters.models"},
    "gateway": {
        "swarm.client",
        "swarm.code_snapshots",
        "swarm.data",
        "swarm.http",
        "swarm.credentials",
        "reward_hooks",
        "adapters.dialects",
    },
}
# roots, which build across layers: nothing else in gateway/ uses them
MAY_IMPORT["gateway.launch"] = {*MAY_IMPORT["gateway"], "gateway"}
MAY_IMPORT["gateway.cli"] = {
    *MAY_IMPORT["gateway.launch"],
    "gateway.launch",
    "swarm.research",
    "swarm.agentjet.yaml_job",
}
MAY_IMPORT_HEAVY = {"adapters.verl", "adapters.models"}
THIRD_PARTY_OF_BASE = {"pydantic", "pydantic_core", "yaml"}
#: Packages whose own modules are layers of their own: a circle may not pass through them one by one.
LOOSE = {"swarm", "swarm.server", "gateway", "reward_hooks", "adapters"}
#: The composition roots: core modules that may name a pack, each with its reason.
PACK_ROOTS = {
    "swarm.packs": "the table of what packs add to the core",
    "gateway.cli.root": "the table of commands, which a pack may have some of",
    "reward_hooks.loader": "the table of built-in hooks, by the names that users write",
}
#: Layers that build across layers: they load what they build by its name.
ROOTS = {"gateway.cli", "gateway.launch"}
#: Other modules that name, by a string, a module that they must not import: each with what it may name, and why.
MAY_START: dict[str, set[str]] = {
    # the table of what packs add, and the command line that starts a server for a client
    "swarm.packs": {
        "swarm.agentjet",
        "swarm.server.webhook",
        "gateway.page",
        "gateway.redaction",
        "gateway.cli",
        "reward_hooks.compose",
        "adapters.verl",
    },
    # the server starts its engine as a process of its own, and imports nothing of it
    "swarm.server.engine.supervisor": {"adapters.verl"},
}
_PACK_NAME = re.compile("|".join(rf"\b{re.escape(name)}\b" for pack in PACKS.values() for name in pack.modules))
#: Names with an underscore that their owners document as public.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields"}


@dataclass(frozen=True)
class Module:
    """What the rules look at in one file."""

    #: dotted names that it imports, at any depth, also under ``TYPE_CHECKING``
    imports: set[str] = field(default_factory=set[str])
    #: names that it defines or assigns, attributes included
    defines: set[str] = field(default_factory=set[str])
    #: attributes with a leading underscore that it reads or calls, each with its line
    private: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    #: its strings, other than docstrings
    strings: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, source: str) -> Self:
        found = cls()
        docstrings: set[ast.AST] = set()
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Expr(value=ast.Constant() as text):
                    docstrings.add(text)
                case ast.Constant(value=str(text)) if node not in docstrings:
                    found.strings.add(text)
                case ast.Import():
                    found.imports.update(alias.name for alias in node.names)
                case ast.ImportFrom():
                    assert node.level == 0, f"relative import of {node.module}"
                    found.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    found.defines.add(node.name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.defines.add(name)
                case ast.Attribute(attr=name):
                    if isinstance(node.ctx, ast.Store):
                        found.defines.add(name)
                    if name.startswith("_") and not name.startswith("__"):
                        found.private.append((name, node.lineno))
        return found


@cache
def modules() -> dict[str, Module]:
    """Every product module by its dotted name. Takes a second, so that one test does it for all rules."""
    found: dict[str, Module] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Module.of(path.read_text())
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


def started(module: str, source: Module, modules: Container[str]) -> set[str]:
    """What ``module`` loads or starts by a string, ``package.module`` or ``package.module:attribute``, unless a table
    allows it."""
    named = {text.partition(":")[0] for text in source.strings}
    allowed = MAY_START.get(module, set[str]())
    return {
        name
        for name in named
        if "." in name and name in modules and not any(f"{name}.".startswith(f"{start}.") for start in allowed)
    }


def test_a_module_that_is_started_by_a_string_obeys_the_table_of_imports() -> None:
    def wrong(source: str, module: str = "swarm.client.child") -> list[str]:
        return violations(module, started(module, Module.of(source), {"gateway.cli", "adapters.verl", "swarm.job"}))

    assert wrong("COMMAND = ('python', '-m', 'gateway.cli')") != []
    assert wrong("load_attribute('gateway.cli:main')") != []
    assert wrong("COMMAND = ('python', '-m', 'adapters.verl')", "swarm.server.engine.resolving") != []
    assert wrong("COMMAND = ('python', '-m', 'adapters.verl')", "swarm.server.engine.supervisor") == []
    assert wrong("""NAMES = ('-m', 'swarm.job', 'gateway.clipper', 'see gateway.cli')""") == []


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
        ("swarm.client.workflow", "swarm.agentjet.workflow"),
        ("swarm.server.app", "swarm.agentjet"),
        ("swarm.agentjet.yaml_job", "swarm.client"),
        ("swarm.agentjet.shim", "swarm.server.app"),
        ("gateway.app", "swarm.agentjet"),
        ("swarm.types", "starlette"),
        ("swarm.credentials", "swarm.http.serve"),
        ("swarm.code_snapshots.archive", "httpx"),
        ("swarm.code_snapshots.archive", "swarm.client"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, imported: str) -> None:
    assert violations(module, {imported})


def pack_edges(module: str, source: Module) -> list[str]:
    """Where ``module`` names a pack that it must not: a core module any, a pack one that it does not need."""
    own = pack_of(module)
    may = {"", own, *(PACKS[own].needs if own else ())}
    named = {*source.imports, *(name for text in source.strings for name in _PACK_NAME.findall(text))}
    packs = {pack for name in named if (pack := pack_of(name)) not in may}
    return [] if module in PACK_ROOTS else [f"{module} -> {pack}" for pack in sorted(packs)]


def test_what_new_makes_imports_no_pack_that_may_be_gone() -> None:
    made = sorted((ROOT / "gateway" / "scaffold" / "template").glob("*.py.tmpl"))
    assert made
    assert [edge for file in made for edge in pack_edges("gateway.scaffold", Module.of(file.read_text()))] == []


def test_an_edge_to_a_pack_is_reported() -> None:
    def edges(source: str, module: str = "gateway.app") -> list[str]:
        return pack_edges(module, Module.of(source))

    assert edges("def late():\n    from gateway.tui.app import MonitorApp") != []
    assert edges("COMMAND = ['-m', 'swarm.research.episode_process']") != []
    assert edges('load_attribute("reward_hooks.judges:make_judge")') != []
    assert edges("import gateway.tui", "gateway.replay.run") != [], "packs do not know each other"
    assert edges('"""See :mod:`gateway.tui`."""\nimport gateway.tuition\nNAME = "gateway.tuition"') == []
    assert (
        edges("import gateway.tui.targets", "gateway.tui.app") == edges("import gateway.tui", "gateway.cli.root") == []
    )


def file_graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """module -> our modules that it imports."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        # `from package import name` imports the module `package.name`, or a name of `package`
        named = {one if one in modules else one.rpartition(".")[0] for one in module.imports}
        graph[name] = {one for one in named if one in modules and one != name}
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


def test_a_circle_is_reported() -> None:
    files = {"gateway.api.a": {"gateway.limits.b"}, "gateway.limits.c": {"gateway.api.d"}}
    assert circle(files) == []
    assert circle(package_graph(files)) != []


def private_names(module: Module, ours: set[str]) -> list[str]:
    """Names with a leading underscore that belong to somebody else."""
    imported = {
        f"imports {name}"
        for name in module.imports
        if name.split(".")[0] not in {*PACKAGES, "__future__"} and any(one.startswith("_") for one in name.split("."))
    }
    return [*sorted(imported), *(f"line {line}: {name}" for name, line in module.private if name not in ours)]


def test_a_private_name_is_reported() -> None:
    module = Module.of("import uvicorn._a\nfrom uvicorn import _b\napp._router\nself._own = 1\nself._own")
    assert private_names(module, module.defines) == ["imports uvicorn._a", "imports uvicorn._b", "line 3: _router"]


def test_the_sources_follow_the_table_have_no_circles_and_use_no_private_name_of_a_dependency() -> None:
    sources = modules()
    assert [line for name, module in sources.items() for line in violations(name, module.imports)] == []
    loaders = {name: module for name, module in sources.items() if layer_of(name) not in ROOTS}
    assert [line for name, module in loaders.items() for line in violations(name, started(name, module, sources))] == []
    assert {edge for name, module in sources.items() for edge in pack_edges(name, module)} == set()
    files = file_graph(sources)
    assert circle(files) == []
    assert circle(package_graph(files)) == []
    ours = DOCUMENTED.union(*(module.defines for module in sources.values()))
    product = {name: module for name, module in sources.items() if layer_of(name) != "adapters.verl"}
    assert {name: found for name, module in product.items() if (found := private_names(module, ours))} == {}


def test_light_packages_load_no_torch() -> None:
    probe = "import sys, gateway.app, gateway.cli, swarm.client, swarm.server.app, reward_hooks; "
    probe += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
