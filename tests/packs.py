"""The packs: what can be deleted without the core noticing. The core is every other module.

Invariant: this is the one table of packs. ``tests/test_layering.py`` holds the imports to it, and ``python -m
tests.packs`` deletes the packs in copies of the tree (``make test-packs``: and runs the core's tests there).
"""

from __future__ import annotations

import compileall
import importlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "reward_hooks", "adapters", "gateway")
#: Tests of the product as a whole: pages, tutorials, and what users do with all of its commands.
WHOLE = (
    "tests/test_docs.py",
    "tests/test_docs_and_code.py",
    "tests/test_names.py",
    "tests/test_package.py",
    "tests/tutorial",
    "tests/benchmarks",
    "tests/gateway/cli/test_mistakes.py",
    "tests/gateway/cli/test_windows.py",
)
#: For one command.
SECONDS = 600.0
#: Other people's modules that take long to import: imported once, by the process that all tries are forked from.
_PRELOADED = ("aiohttp", "numpy", "prometheus_client", "rich.text", "textual.app", "typer", "uvicorn", "zmq")


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
            "tests/gateway/cli/test_agentjet.py",
            "tests/adapters/verl/test_agentjet_job.py",
            "tests/clients/test_agentjet.py",
        ),
        needs=("monitor",),
    ),
    "studies": Pack(
        ("swarm.research", "gateway.cli.research"),
        ("tests/swarm/research", "tests/tutorial/test_research.py", "benchmarks/study.py"),
    ),
    "monitor": Pack(("gateway.tui", "gateway.cli.monitor"), ("tests/gateway/tui", "tests/gateway/cli/test_monitor.py")),
    "page": Pack(("gateway.page",), ("tests/gateway/page", "benchmarks/judging.py")),
    "redaction": Pack(
        ("gateway.redaction",),
        ("tests/gateway/redaction", "tests/clients/test_presidio.py", "benchmarks/redaction.py"),
    ),
    "replay": Pack(
        ("gateway.replay", "gateway.cli.replay", "gateway.cli.evaluate", "gateway.launch.versions"),
        (
            "tests/gateway/replay",
            "tests/gateway/cli/test_replay.py",
            "tests/gateway/cli/test_evaluate.py",
            "tests/gateway/rollout/test_untrained_replay.py",
        ),
        needs=("trying-hooks",),
    ),
    "rewards": Pack(
        ("reward_hooks.builtin",),
        (
            "tests/reward_hooks/builtin",
            "tests/reward_hooks/test_catalog.py",
            "tests/reward_hooks/*preferences.py",
        ),
    ),
    "judges": Pack(("reward_hooks.judges",), ("tests/reward_hooks/judges",)),
    "trying-hooks": Pack(
        ("gateway.cli.hooks", "reward_hooks.offline"),
        (
            "tests/gateway/cli/test_hooks.py",
            "tests/gateway/test_tried_hooks.py",
            "tests/reward_hooks/test_offline.py",
            "tests/reward_hooks/test_agreement.py",
        ),
    ),
    "groups": Pack(
        ("gateway.cli.groups", "gateway.views.groups_view"), ("tests/gateway/cli/test_groups.py",), needs=("export",)
    ),
    "export": Pack(
        ("swarm.server.journal.export", "gateway.cli.swarm_export"),
        (
            "tests/swarm/server/journal/test_export.py",
            "tests/swarm/server/journal/test_groups.py",
            "tests/gateway/cli/test_export.py",
            "tests/gateway/test_seeing_why.py",
        ),
    ),
    "scaffold": Pack(
        ("gateway.scaffold",),
        ("tests/gateway/cli/test_new.py", "tests/tutorial/test_scaffold.py", "tests/tutorial/test_skill.py"),
        # of what it makes
        needs=("replay", "rewards", "trying-hooks"),
    ),
    "watch": Pack(
        ("swarm.evidence.watch",),
        ("tests/swarm/evidence/test_watch.py", "tests/swarm/server/episodes/test_training_watch.py"),
    ),
    "webhook": Pack(("swarm.server.webhook",), ("tests/swarm/server/test_webhook.py",)),
    "blends": Pack(("reward_hooks.compose",), ("tests/reward_hooks/*compose.py", "benchmarks/hooks.py")),
    "shared-prefixes": Pack(
        ("adapters.verl.tree",),
        (
            "tests/adapters/verl/*trie*.py",
            "tests/adapters/verl/token_trees.py",
            "tests/adapters/verl/compare_ways.py",
            "tests/adapters/verl/*shared_prefixes.py",
        ),
    ),
}


def pack_of(module: str) -> str:
    """The pack of a dotted name; empty: it is of the core."""
    owned = (name for name, pack in PACKS.items() if any(f"{module}.".startswith(f"{own}.") for own in pack.modules))
    return next(owned, "")


def main() -> None:
    """Delete packs in copies of the tree. Without any one (and those that need it), all modules that are left can be
    imported, and the command line answers; with the argument ``core``: without them all, the core's fast tests pass."""
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=1, workers=0)
    with tempfile.TemporaryDirectory(prefix="packs-") as scratch, ThreadPoolExecutor(os.cpu_count()) as workers:
        whole = _copy(Path(scratch) / "whole", PACKAGES)
        for _ in workers.map(partial(_try_without, whole), PACKS):
            pass
        if sys.argv[1:] != ["core"]:
            return
        core = _copy(Path(scratch) / "all packs", (".",))
        _delete(core, *PACKS)
        _run(core, "-m", "pytest", "-q", "-n", "4", "--dist", "worksteal", *(f"--ignore={path}" for path in WHOLE))


def _try_without(whole: Path, pack: str) -> None:
    copy = shutil.copytree(whole, whole.with_name(pack), copy_function=os.link)
    _delete(copy, pack, *(name for name, other in PACKS.items() if pack in other.needs))
    paths = [path.relative_to(copy) for package in PACKAGES for path in sorted((copy / package).rglob("*.py"))]
    # the engine's modules need torch: tests/test_layering.py alone holds what they import
    light = [path.with_suffix("") for path in paths if "__" not in path.name and path.parts[:2] != ("adapters", "verl")]
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(_PRELOADED))
    trial = processes.Process(target=_import_and_help, args=(copy, [".".join(path.parts) for path in light]))
    trial.start()
    trial.join(SECONDS)
    if trial.exitcode != 0:
        trial.kill()
        sys.exit(f"without {pack}: see above")


def _import_and_help(folder: Path, modules: Sequence[str]) -> None:
    """As in a process whose modules are those of ``folder``, and not those that are installed."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in modules:
        module = importlib.import_module(name)
        assert folder in Path(str(module.__file__)).parents, module
    sys.argv[1:] = ["--help"]
    with redirect_stdout(io.StringIO()):
        importlib.import_module("gateway.cli").main()


def _copy(folder: Path, paths: Sequence[str]) -> Path:
    """What is tracked below ``paths``, in ``folder``."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        # its bytecode is valid for a copy of the same time
        for path in (name, cache_from_source(name)):
            if (ROOT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


def _delete(folder: Path, *names: str) -> None:
    """Delete these packs and their tests."""
    for pack in (PACKS[name] for name in names):
        modules = (f"{module.replace('.', '/')}{end}" for module in pack.modules for end in ("", ".py"))
        for path in [path for pattern in (*pack.tests, *modules) for path in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run(folder: Path, *arguments: str) -> None:
    """Run Python in ``folder``, whose modules win over those that are installed; leave with its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        sys.exit(f"without {folder.name}: {done.stdout[-8000:]}{done.stderr[-8000:]}")


if __name__ == "__main__":
    main()
