"""The packs: what can be deleted without the core noticing. The core is every other module.

Invariant: this is the one table of packs. ``tests/test_layering.py`` holds the imports to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pack:
    """One pack.

    Attributes:
        modules: dotted names; a package stands for all that is in it.
        tests: its tests, and what else only they and the pack's benchmarks need: paths, or patterns of paths.
        needs: other packs that its modules may import.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()


PACKS: dict[str, Pack] = {
    "agentjet": Pack(
        ("swarm.agentjet", "gateway.cli.agentjet"),
        (
            "tests/swarm/agentjet",
            "tests/swarm/server/*agentjet*.py",
            "tests/gateway/cli/test_agentjet.py",
            "tests/clients/test_agentjet.py",
        ),
        needs=("monitor",),
    ),
    "studies": Pack(
        ("swarm.research", "gateway.cli.research"),
        ("tests/swarm/research", "tests/tutorial/test_research.py", "benchmarks/study.py"),
    ),
    "monitor": Pack(("gateway.tui", "gateway.cli.monitor"), ("tests/gateway/tui", "tests/gateway/cli/test_monitor.py")),
    "replay": Pack(
        ("gateway.replay", "gateway.cli.replay"), ("tests/gateway/replay", "tests/gateway/cli/test_replay.py")
    ),
    "rewards": Pack(("reward_hooks.builtin",), ("tests/reward_hooks/builtin",)),
    "judges": Pack(("reward_hooks.judges",), ("tests/reward_hooks/judges",)),
    "shared-prefixes": Pack(
        ("adapters.verl.tree",),
        (
            "tests/adapters/verl/*trie*.py",
            "tests/adapters/verl/token_trees.py",
            "tests/adapters/verl/*shared_prefixes.py",
        ),
    ),
}


def pack_of(module: str) -> str:
    """The pack of a dotted name; empty: it is of the core."""
    owned = (name for name, pack in PACKS.items() if any(f"{module}.".startswith(f"{own}.") for own in pack.modules))
    return next(owned, "")
