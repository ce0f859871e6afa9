"""The code of experiments: the tracked files of the study's folder as it began, and copies of them with a patch.

Invariant: a copy differs from the beginning in declared files alone, whatever a patch says and however git
understands it: the two manifests are compared after it was applied. An evaluation runs a fresh copy of the code as
the study began, with that digest.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from swarm.code_snapshots import CodeArchive, build_archive, check_and_extract
from swarm.code_snapshots.archive import package_of
from swarm.code_snapshots.manifest import digest_of, fingerprint, manifest_of
from swarm.errors import ConfigError, SwarmGatewayError
from swarm.files import replace_file
from swarm.research.study import FILE, Study, inside, read_study

#: Below the study's folder; git is to ignore it.
RUNS = "runs"
_GIT_SECONDS = 60.0


class RefusedError(SwarmGatewayError):
    """A patch is not one that the study allows."""


class Tree(NamedTuple):
    """Code on disk; ``archive`` has the same files for a swarm server."""

    digest: str
    folder: Path
    archive: bytes


def snapshot(study: Study, folder: Path) -> tuple[str, str, str]:
    """Keep the code of the study in ``folder`` that git tracks, as it is now.

    Returns:
        Its digest, the digest of its locked files, and the commit.

    Raises:
        ConfigError: the folder is in no git checkout, or a locked file or a package for the engine is not tracked.
    """
    code = build_archive(folder / study.code)
    for name in study.locked:
        if not any(inside(file, name) for file in code.manifest):
            raise ConfigError(f"{folder / study.code / name} is locked, but git does not track it: `git add` it")
    there = {package_of(file) for file in code.manifest}
    if unknown := [name for name in study.sync_packages if name not in there]:
        raise ConfigError(f"sync_packages: git tracks no package {unknown[0]!r} in {folder / study.code}")
    _keep(folder, code)
    return code.digest, _locked_digest(study, folder, code.manifest), code.revision


def kept(folder: Path, digest: str, name: str) -> Tree:
    """What :func:`snapshot` or :func:`patched` kept, in a fresh folder for the one user ``name``.

    Raises:
        ConfigError: it is gone, or was changed.
    """
    try:
        archive = _path_of(folder, digest).read_bytes()
        target = folder / RUNS / name / digest
        shutil.rmtree(target, ignore_errors=True)
        manifest = check_and_extract(archive, target)
    except (OSError, SwarmGatewayError) as exc:
        raise ConfigError(
            f"the code {digest[:12]} of the study is gone from {_path_of(folder, digest)}: {exc}"
        ) from exc
    if digest_of(manifest) != digest:
        raise ConfigError(f"{_path_of(folder, digest)} was changed")
    return Tree(digest, target, archive)


def packed(tree: Tree, packages: Collection[str]) -> bytes:
    """The archive of these packages of ``tree`` alone."""
    part = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(tree.archive)) as whole, zipfile.ZipFile(part, "w") as writer:
        for entry in whole.infolist():
            if package_of(entry.filename) in packages:
                writer.writestr(entry, whole.read(entry))
    return part.getvalue()


def _locked_digest(study: Study, folder: Path, manifest: Mapping[str, str]) -> str:
    """The digest of the files that decide the score, the study's own declaration among them."""
    # where it runs may change: servers die
    declared = read_study(folder).model_dump_json(exclude={"servers", "boot_seconds"})
    locked = {
        name: fingerprint for name, fingerprint in manifest.items() if any(inside(name, top) for top in study.locked)
    }
    return digest_of(locked | {f"declared/{FILE}": fingerprint(declared.encode(), executable=False)})


def check_locked(study: Study, folder: Path, digest: str) -> None:
    """Check that the locked files of the study are those that it began with.

    Raises:
        ConfigError: they are not.
    """
    if _locked_digest(study, folder, build_archive(folder / study.code).manifest) != digest:
        raise ConfigError(
            f"the metric, the evaluator or {FILE} in {folder} is not the one that the study began with: put it back, "
            "or copy the folder without its ledger for another study"
        )


def patched(study: Study, folder: Path, base: str, patch: str) -> str:
    """Keep the code with the digest ``base`` with ``patch``; its digest.

    Raises:
        RefusedError: it does not apply, or changes something that the study does not declare.
    """
    if not study.patch_paths:
        raise RefusedError("the study allows no patches: it has no patch_paths")
    with tempfile.TemporaryDirectory(prefix="patch-", dir=folder / RUNS) as made:
        work = kept(folder, base, Path(made).name).folder
        before = manifest_of(work)
        # a repository of its own: git neither sees nor touches the one around it
        _git(work, "init", "--quiet")
        # to git, one without its last newline is corrupt
        _git(work, "apply", "--whitespace=nowarn", "-", stdin=patch if patch.endswith("\n") else f"{patch}\n")
        if link := next((path for path in work.rglob("*") if path.is_symlink()), None):
            raise RefusedError(f"it makes a link of {link.relative_to(work)}")
        _git(work, "add", "--all", "--force")
        try:
            code = build_archive(work)
        except ConfigError as exc:
            raise RefusedError(exc.message) from exc
        changed = {name for name in {*before, *code.manifest} if before.get(name) != code.manifest.get(name)}
        # what is left out, such as bytecode, would be there for imports all the same
        if wrong := [*sorted(name for name in changed if not study.may_patch(name)), *sorted(code.left_out)]:
            raise RefusedError(f"it changes {wrong[0]}; the study allows {', '.join(study.patch_paths)}")
        if modes := sorted(name for name in changed if _executable(before, name) != _executable(code.manifest, name)):
            raise RefusedError(f"it changes the mode of {modes[0]}")
        if not changed:
            raise RefusedError("it changes nothing")
    _keep(folder, code)
    return code.digest


def _executable(manifest: Mapping[str, str], name: str) -> bool:
    return manifest.get(name, "").endswith("x")


def _path_of(folder: Path, digest: str) -> Path:
    return folder / RUNS / "code" / f"{digest}.zip"


def _keep(folder: Path, code: CodeArchive) -> None:
    path = _path_of(folder, code.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, code.content)


def _git(work: Path, *command: str, stdin: str = "") -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # no hook, filter or attribute of the user's own
    environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    try:
        subprocess.run(
            ["git", "-c", "core.autocrlf=false", "-c", "core.hooksPath=", "-C", str(work), *command],
            input=stdin.encode(errors="surrogateescape"),
            env=environ,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except FileNotFoundError as exc:
        raise ConfigError("studies need git") from exc
    except subprocess.TimeoutExpired as exc:
        raise RefusedError(f"git {command[0]} took longer than {_GIT_SECONDS:g} s") from exc
    except subprocess.CalledProcessError as exc:
        errors = " ".join(os.fsdecode(exc.stderr).split())
        raise RefusedError(f"git {command[0]}: {errors[:500]}") from exc
