"""Packing a folder: only what git tracks, equal files give equal bytes, and what is left out is said."""

from __future__ import annotations

import io
import ntpath
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.code_snapshots import ArchiveLimits, build_archive, check_and_extract
from swarm.code_snapshots.archive import _files
from swarm.code_snapshots.manifest import digest_of, manifest_of
from swarm.errors import ConfigError
from tests.swarm.code_snapshots.making import git, tracked


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    for name, text in {
        ".gitignore": "*.pyc\n.env\n/runs/\n",
        "agent.py": "print(1)",
        "pkg/__init__.py": "",
        "pkg/tool.sh": "#!/bin/sh",
        "data/raw/rows.jsonl": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pkg/tool.sh").chmod(0o755)
    return tracked(folder)


def packed(folder: Path, limits: ArchiveLimits | None = None) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(build_archive(folder, limits=limits).content)) as reader:
        return {name: reader.read(name) for name in reader.namelist()}


NAMES = [".gitignore", "agent.py", "data/raw/rows.jsonl", "pkg/__init__.py", "pkg/tool.sh"]


def test_only_what_git_tracks_is_packed(code: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "swarm.code_snapshots")
    for name in (".env", "old.pyc", "runs/journal.sqlite", "notes.txt", "new/idea.py"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("secret")
    assert sorted(packed(code)) == NAMES
    assert sorted(packed(code / "pkg")) == ["__init__.py", "tool.sh"]
    left_out = build_archive(code).left_out
    assert left_out == dict.fromkeys((".env", "old.pyc", "runs/"), "git ignores it") | dict.fromkeys(
        ("new/", "notes.txt"), "git does not track it"
    )
    assert "because git does not track it: new/, notes.txt" in caplog.text


def test_files_go_as_they_are_in_the_work_tree(code: Path) -> None:
    git(code, "commit", "--quiet", "-m", "first")
    (code / "agent.py").write_text("print(2)")
    (code / "added.py").write_text("print(3)")
    git(code, "add", "added.py")
    (code / "added.py").write_text("print(4)")
    (code / "pkg/tool.sh").unlink()
    git(code, "rm", "--quiet", "--cached", "data/raw/rows.jsonl")
    files = packed(code)
    assert (files["agent.py"], files["added.py"]) == (b"print(2)", b"print(4)")
    assert sorted(files) == [".gitignore", "added.py", "agent.py", "pkg/__init__.py"]


def test_a_folder_in_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text("")
    with pytest.raises(ConfigError, match=r"in no git checkout.*git init.*git add"):
        build_archive(tmp_path)
    git(tmp_path, "init", "--quiet")
    with pytest.raises(ConfigError, match=r"nothing to send.*git add"):
        build_archive(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="git is not installed"):
        build_archive(tmp_path)


def test_no_other_checkout_is_packed_and_no_program_of_it_runs(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    trap.chmod(0o755)
    (code / ".gitattributes").write_text("* filter=trap\n")
    git(code, "add", ".gitattributes")
    for key in ("core.fsmonitor", "filter.trap.clean", "filter.trap.smudge", "core.pager", "core.sshCommand"):
        git(code, "config", key, str(trap))
    (code / "agent.py").write_text("print(2)")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/secret.key").write_text("")
    other = tracked(tmp_path / "other")
    # as in a hook of git's
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert sorted(packed(code)) == [".gitattributes", *NAMES]
    assert not (tmp_path / "ran").exists()


def test_a_git_that_hangs_is_given_up(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("swarm.code_snapshots.archive._GIT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="did not list"):
        build_archive(code)


def test_equal_files_are_equal_bytes(code: Path, tmp_path: Path) -> None:
    first = build_archive(code)
    copy = tmp_path / "copy"
    for name in reversed(NAMES):
        other = copy / name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes((code / name).read_bytes())
        other.chmod((code / name).stat().st_mode)
        os.utime(other, (10, 10))
    assert build_archive(tracked(copy)) == first
    (copy / "agent.py").write_text("print(2)")
    assert build_archive(copy).content != first.content


def test_where_a_disk_has_no_modes_those_of_git_count(code: Path, tmp_path: Path) -> None:
    """As Windows' disks, of which git keeps ``core.fileMode`` off: in its Linux all their files are executable."""
    (code / "run").symlink_to("pkg/tool.sh")
    git(code, "add", "run")
    git(code, "config", "--unset", "core.fileMode")
    first = build_archive(code)
    git(code, "config", "core.fileMode", "no")
    for mode in (0o777, 0o666):
        for name in NAMES:
            (code / name).chmod(mode)
        assert build_archive(code) == first
    assert sorted(name for name, mark in first.manifest.items() if mark.endswith("x")) == ["pkg/tool.sh", "run"]


def test_a_link_that_the_checkout_has_as_a_text_is_not_sent(code: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on Windows: its content is the path to the file."""
    for name in ("text.py", "kept.py", "copy.py", "gone.py"):
        (code / name).symlink_to("agent.py")
    git(code, "add", ".")
    git(code, "config", "core.symlinks", "false")
    for name in ("text.py", "copy.py", "gone.py"):
        (code / name).unlink()
    (code / "text.py").write_text("agent.py")
    # who needs it there puts the file in its place
    (code / "copy.py").write_text("print(1)")
    files = packed(code)
    assert (files.get("text.py"), files["kept.py"], files["copy.py"]) == (None, b"print(1)", b"print(1)")
    assert "because it is a link, of which this checkout has the text alone: text.py" in caplog.text
    assert "gone.py" not in caplog.text


def test_files_are_found_where_paths_have_backslashes(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of git have slashes, and cases of letters that the disk need not have."""
    path = SimpleNamespace(**{**vars(os.path), "join": ntpath.join, "normcase": ntpath.normcase})
    monkeypatch.setattr("swarm.code_snapshots.archive.os", SimpleNamespace(**{**vars(os), "path": path}))
    left_out: dict[str, str] = {}
    files = _files(code, NAMES, left_out, ArchiveLimits())
    assert ([name for name, *_ in files], left_out) == (NAMES, {})


def test_a_link_goes_as_the_tracked_file_that_it_leads_to(code: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("secret")
    (code / ".env").write_text("secret")
    targets = {
        "inner.py": "agent.py",
        "out.py": "../outside.py",
        "ignored.py": ".env",
        "gone.py": "x",
        "loop": ".",
        "odd": "agent.py/x",
        "round": "round",
    }
    for name, target in targets.items():
        (code / name).symlink_to(target)
    git(code, "add", *targets)
    files = packed(code)
    assert files["inner.py"] == b"print(1)"
    assert sorted(files) == sorted([*NAMES, "inner.py"])
    assert build_archive(code).left_out == {
        ".env": "git ignores it",
        "out.py": "it leads to no file that is tracked in this folder",
        "ignored.py": "it leads to no file that is tracked in this folder",
        "loop": "it leads to no file that is tracked in this folder",
        "gone.py": "it is a link to nothing",
        "odd": "it is a link to nothing",
        "round": "it is a link to nothing",
    }


def test_what_took_the_place_of_tracked_files_is_not_packed(code: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("__init__.py", "tool.sh"):
        (tmp_path / "elsewhere" / name).write_text("secret")
        (code / "pkg" / name).unlink()
    (code / "pkg").rmdir()
    (code / "pkg").symlink_to(tmp_path / "elsewhere")
    (code / "agent.py").unlink()
    os.mkfifo(code / "agent.py")
    files = packed(code)
    assert sorted(files) == [".gitignore", "data/raw/rows.jsonl"]
    assert build_archive(code).left_out["agent.py"] == "it is not a regular file"


def test_a_submodule_is_left_out(code: Path, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/lib.py").write_text("")
    git(tracked(tmp_path / "library"), "commit", "--quiet", "-m", "first")
    git(code, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "library"), "lib")
    archive = build_archive(code)
    assert archive.left_out == {"lib": "it is a submodule"}
    assert sorted(packed(code)) == [".gitignore", ".gitmodules", *NAMES[1:]]


def test_files_and_folders_over_the_limits(code: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (code / "weights.bin").write_bytes(b"x" * 5000)
    git(code, "add", "weights.bin")
    assert "weights.bin" not in packed(code, ArchiveLimits(max_file_bytes=4096))
    assert "because it has 5000 bytes, more than 4096: weights.bin" in caplog.text
    git(code, "rm", "--quiet", "--force", "weights.bin")
    with pytest.raises(ConfigError, match="no folder"):
        build_archive(tmp_path / "none")
    with pytest.raises(ConfigError, match="5 files, at most 3"):
        build_archive(code, limits=ArchiveLimits(max_files=3))
    (code / "largest.py").write_bytes(os.urandom(3000))
    git(code, "add", "largest.py")
    with pytest.raises(ConfigError, match=r"3\d+ bytes, at most 1024.*largest.py \(3000 bytes\)"):
        build_archive(code, limits=ArchiveLimits(max_total_bytes=1024))
    with pytest.raises(ConfigError, match="packed they have"):
        build_archive(code, limits=ArchiveLimits(max_archive_bytes=1024))
    (code / "a:b.py").write_text("")
    git(code, "add", "a:b.py")
    with pytest.raises(ConfigError, match=r"a:b\.py.*colon"):
        build_archive(code)


PARTS = st.sampled_from(["a", "b", "c.py", "d.key", ".env", "run s", "é", "x*"])
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
RULES = st.lists(
    st.builds(
        lambda no, name, end: f"{no}{name}{end}", st.sampled_from(["", "!", "/"]), PATHS, st.sampled_from(["", "/"])
    ),
    max_size=4,
)


@given(
    files=st.sets(PATHS, min_size=1, max_size=12),
    rules=st.dictionaries(st.sampled_from(["", "a/", "b/a/"]), RULES, max_size=3),
    added=st.lists(PATHS, max_size=6),
    forced=st.lists(PATHS, max_size=2),
    dropped=st.lists(PATHS, max_size=2),
    links=st.dictionaries(PATHS, PATHS, max_size=2),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_git_ignores_or_does_not_track_is_in_no_archive(
    tmp_path_factory: pytest.TempPathFactory,
    files: set[str],
    rules: dict[str, list[str]],
    added: list[str],
    forced: list[str],
    dropped: list[str],
    links: dict[str, str],
) -> None:
    code = tmp_path_factory.mktemp("tree")
    git(code, "init", "--quiet")

    def free(name: str) -> bool:
        path = code / name
        return not os.path.lexists(path) and all(one.is_dir() for one in path.parents if os.path.lexists(one))

    for folder, lines in rules.items():
        if free(f"{folder}.gitignore"):
            (code / folder).mkdir(parents=True, exist_ok=True)
            (code / folder / ".gitignore").write_text("\n".join(lines))
    for name in sorted(files):
        if free(name):
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            # what it holds says which file it is
            (code / name).write_text(name)
    for name, target in links.items():
        if free(name):
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            (code / name).symlink_to(code / target)
    there = {path.relative_to(code).as_posix() for path in code.rglob("*")}
    literal = ("--literal-pathspecs",)
    for name in added:
        if name in there:
            # fails for what is ignored, unless it is forced
            git(code, *literal, "add", "--force" if name in forced else "--all", "--", name, check=False)
    for name in dropped:
        git(code, *literal, "rm", "-r", "--quiet", "--cached", "--ignore-unmatch", "--", name)

    # what git itself says of each file
    status = git(code, "status", "--porcelain=v1", "-z", "--ignored=matching", "--untracked-files=all").decode()
    unwanted = [entry[3:] for entry in status.split("\0") if entry[:2] in ("??", "!!")]
    secret = {
        name
        for name in there
        if (code / name).is_file()
        and not (code / name).is_symlink()
        and any(name == one or (one.endswith("/") and name.startswith(one)) for one in unwanted)
    }
    try:
        archive = packed(code)
    except ConfigError as exc:
        assert "nothing to send" in exc.message
        return
    assert not set(archive) & secret
    contents = {content.decode() for content in archive.values()}
    assert not contents & secret, "a link let them in"
    known = set(git(code, "ls-files", "-z").decode().split("\0"))
    assert {name for name in known if (code / name).is_file() and not (code / name).is_symlink()} <= set(archive)


def test_named_packages_go_alone_and_the_others_are_told(code: Path) -> None:
    (code / "one.py").write_text("")
    (code / "pkg/notes.txt").write_text("")
    (code / "pkg/__pycache__").mkdir()
    (code / "pkg/__pycache__/x.bin").write_text("")
    git(code, "add", "one.py", "pkg/__pycache__/x.bin")
    packed_ = build_archive(code, packages=["pkg", "one"])
    assert sorted(packed_.manifest) == ["one.py", "pkg/__init__.py", "pkg/tool.sh"]
    assert packed_.left_out == {
        "pkg/notes.txt": "git does not track it",
        "pkg/__pycache__/x.bin": "it is bytecode",
        **dict.fromkeys((".gitignore", "agent.py", "data/"), "it is none of the named packages"),
    }
    with pytest.raises(ConfigError, match=r"no package 'agnt'.*there are: .gitignore, agent, data"):
        build_archive(code, packages=["agnt"])


def test_the_revision_says_whether_all_is_committed(code: Path) -> None:
    assert build_archive(code).revision == ""
    git(code, "commit", "--quiet", "-m", "first")
    commit = git(code, "rev-parse", "HEAD").decode().strip()
    assert build_archive(code).revision == commit
    (code / "notes.txt").write_text("")
    assert build_archive(code).revision == commit, "what is not sent does not count"
    for change in (lambda: (code / "pkg/__init__.py").unlink(), lambda: (code / "agent.py").write_text("print(2)")):
        change()
        assert build_archive(code).revision == f"{commit}+changes"
    assert build_archive(code / "data").revision == commit


def test_a_repository_of_the_other_format_is_at_its_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--object-format=sha256")
    (tmp_path / "agent.py").write_text("print(1)")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert build_archive(tmp_path).revision == git(tmp_path, "rev-parse", "HEAD").decode().strip()


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_whose_removal_is_only_staged_is_a_change(code: Path, kept: bool) -> None:
    git(code, "commit", "--quiet", "-m", "first")
    commit = git(code, "rev-parse", "HEAD").decode().strip()
    git(code, "rm", "--quiet", *(["--cached"] if kept else []), "agent.py")
    assert build_archive(code).revision == f"{commit}+changes"
    assert build_archive(code, packages=["pkg"]).revision == commit, "what is not sent does not count"


def test_the_digest_is_that_of_the_extracted_files(code: Path, tmp_path: Path) -> None:
    packed_ = build_archive(code)
    manifest = check_and_extract(packed_.content, tmp_path / "there")
    assert manifest == manifest_of(tmp_path / "there") == packed_.manifest
    assert packed_.digest == digest_of(manifest)
