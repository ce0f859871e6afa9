"""Archives built to do harm, by hand where no tool would build them: each is refused, by name, and leaves nothing."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import stat
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.code_snapshots import ArchiveLimits, build_archive, check_and_extract
from swarm.code_snapshots.manifest import MIB, check_name, digest_of, manifest_of
from swarm.errors import RequestError
from tests.swarm.code_snapshots.making import tracked

LIMITS = ArchiveLimits(max_files=20, max_file_bytes=4 * MIB, max_total_bytes=8 * MIB, max_archive_bytes=MIB)


def packed(*entries: tuple[str, bytes], mode: int = 0, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer:
        for name, content in entries:
            info = zipfile.ZipInfo("placeholder")
            # past ZipInfo's own cleaning of names
            info.filename = info.orig_filename = name
            info.external_attr = mode << 16
            info.compress_type = method
            writer.writestr(info, content)
    return buffer.getvalue()


def patched(archive: bytes, at: int, fmt: str, value: int) -> bytes:
    """``archive`` with a field of its first central directory entry overwritten."""
    start = archive.index(b"PK\x01\x02") + at
    return archive[:start] + struct.pack(fmt, value) + archive[start + struct.calcsize(fmt) :]


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(archive: bytes, tmp_path: Path, limits: ArchiveLimits = LIMITS) -> RequestError:
    target = tmp_path / "outer" / "target"
    with pytest.raises(RequestError) as caught:
        check_and_extract(archive, target, limits)
    assert caught.value.code == "bad_archive"
    assert everything(tmp_path) in ([], ["outer"]), "it left something behind"
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "../evil.py",
        "a/../../evil.py",
        "a/..",
        "..",
        "/etc/cron.d/evil",
        "//server/share/evil",
        "C:/evil.py",
        "C:evil.py",
        "a.py:stream",
        "..\\evil.py",
        "a\\b.py",
        "\\evil.py",
        "a\x00.py",
        "a.py\x00/../x",
        "a\nb.py",
        "a//b.py",
        "./a.py",
        "a/./b.py",
        "/",
        "//",
        "a" * 256,
        "d/" * 40 + "a.py",
        "/".join(["a" * 200] * 6),
    ],
)
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    error = refused(packed(("fine.py", b""), (name, b"evil")), tmp_path)
    assert error.param == name[:200]
    assert repr(name[:200]) in error.message
    assert check_name(name)


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("evil", stat.S_IFLNK | 0o777, "symbolic link"),
        ("evil", stat.S_IFCHR | 0o666, "device"),
        ("evil", stat.S_IFIFO | 0o666, "pipe"),
        ("evil", stat.S_IFSOCK | 0o666, "socket"),
        ("evil/", stat.S_IFREG | 0o644, "contents of its own"),
        ("evil/", 0, "contents of its own"),
        ("", 0, "empty"),
    ],
)
def test_entries_that_are_not_files(tmp_path: Path, name: str, mode: int, message: str) -> None:
    error = refused(packed((name, b"/etc/passwd"), mode=mode), tmp_path)
    assert message in error.message and error.param == name


@pytest.mark.parametrize(
    "names",
    [
        ("a.py", "a.py"),
        ("a", "a/b.py"),
        ("a/b.py", "a"),
        ("a", "a/"),
        ("a/", "a"),
        ("a/b", "a/b/c/d.py"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_are_there_twice(tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = names
    error = refused(packed((first, b""), (second, b"")), tmp_path)
    assert "twice" in error.message and error.param in names


def test_encrypted(tmp_path: Path) -> None:
    for flag in (0x1, 0x40):
        error = refused(patched(packed(("secret.py", b"x")), 8, "<H", flag), tmp_path)
        assert "encrypt" in error.message and error.param == "secret.py"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_may_take_any_memory(tmp_path: Path, method: int) -> None:
    assert "compression method" in refused(packed(("a.py", b"x" * 100), method=method), tmp_path).message


MANY = packed(*((f"f{n}", b"") for n in range(21)))


class TestBombs:
    @pytest.mark.parametrize(
        ("archive", "limits", "param", "message"),
        [
            (packed(("big", bytes(5 * MIB))), LIMITS, "big", f"{5 * MIB} bytes, at most {4 * MIB}"),
            (packed(*((f"f{n}", bytes(3 * MIB)) for n in range(3))), LIMITS, "f2", f"more than {8 * MIB}"),
            (MANY, LIMITS, None, "21 entries, at most 20"),
            # the record at the end hides how many there are, or says that the directory is huge
            (MANY[:-14] + struct.pack("<2H", 1, 1) + MANY[-10:], LIMITS, None, "21 entries, at most 20"),
            (packed(("a", b""))[:-10] + struct.pack("<L", 2**31) + bytes(6), LIMITS, None, "not a readable zip"),
            (packed(("a", bytes(range(256)) * 6000), method=zipfile.ZIP_STORED), LIMITS, None, f"at most {MIB}"),
        ],
        ids=["big", "total", "many", "hidden", "directory", "archive"],
    )
    def test_sizes_and_numbers_over_the_limits(
        self, tmp_path: Path, archive: bytes, limits: ArchiveLimits, param: str | None, message: str
    ) -> None:
        error = refused(archive, tmp_path, limits)
        assert message in error.message and error.param == param

    @pytest.mark.parametrize("declared", [0, 10, 2 * MIB, 2**32 - 2])
    def test_a_size_that_is_a_lie(self, tmp_path: Path, declared: int) -> None:
        archive = packed(("liar.py", b"x" * 1000))
        error = refused(patched(archive, 24, "<L", declared), tmp_path)
        assert error.param == "liar.py"

    def test_entries_that_share_their_packed_bytes(self, tmp_path: Path) -> None:
        # one packed file of 1 MiB, to which all entries of the directory point
        content = b"0123456789abcdef" * 60_000
        archive = packed(("f", content))
        start = archive.index(b"PK\x01\x02")
        entry = archive[start:-22]
        count = 8
        end = archive[-22:-14] + struct.pack("<2HLL", count, count, len(entry) * count, start) + b"\0\0"
        error = refused(archive[:start] + entry * count + end, tmp_path)
        assert "twice" in error.message
        names = [entry[:-1] + bytes([97 + n]) for n in range(count)]
        error = refused(archive[:start] + b"".join(names) + end, tmp_path)
        assert "differ" in error.message or "verlap" in error.message


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda archive: b"", "not a readable zip"),
        (lambda archive: b"x" * 100, "not a readable zip"),
        (lambda archive: archive[:-1], "not a readable zip"),
        # a record in the comment of another: zipfile reads the last one
        (lambda archive: archive[:-2] + b"\x16\x00" + packed(), "no files in it"),
        (lambda archive: archive[: archive.index(b"PK\x01\x02")] + archive[-22:], "not a readable zip"),
        (lambda archive: packed(), "no files in it"),
        (lambda archive: archive.replace(b"good.py", b"evil.py", 1), "damaged"),
        (lambda archive: patched(archive, 16, "<L", 12345), "damaged"),
        (lambda archive: patched(archive, 42, "<L", 2**31), "damaged"),
    ],
)
def test_what_is_no_plain_zip(tmp_path: Path, harm: Callable[[bytes], bytes], said: str) -> None:
    assert said in refused(harm(packed(("good.py", b"print(1)" * 9))), tmp_path).message


def test_an_entry_of_zip64_that_lies_nowhere(tmp_path: Path) -> None:
    for start in (2**40, 2**63 - 1, 2**63, 2**64 - 1):
        far = struct.pack("<2HQ", 1, 8, start)
        archive = patched(patched(packed(("far.py", b"")), 42, "<L", 0xFFFFFFFF), 30, "<H", len(far))
        end = archive.index(b"PK\x05\x06")
        size = struct.pack("<L", end - archive.index(b"PK\x01\x02") + len(far))
        archive = archive[:end] + far + archive[end : end + 12] + size + archive[end + 16 :]
        assert "damaged" in refused(archive, tmp_path).message


def test_what_other_tools_build_is_taken(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "pkg").mkdir(parents=True)
    (code / "pkg/mod.py").write_text("x = 1\n" * 1000)
    (code / "ünï.txt").write_text("é")
    (code / "pkg/mod.py").chmod(0o755)
    made = Path(shutil.make_archive(str(tmp_path / "made"), "zip", code))
    there = tmp_path / "there"
    manifest = check_and_extract(made.read_bytes(), there)
    assert everything(there) == ["pkg", "pkg/mod.py", "ünï.txt"]
    assert [os.access(there / name, os.X_OK) for name in ("pkg/mod.py", "ünï.txt")] == [True, False]
    assert check_and_extract(build_archive(tracked(code)).content, tmp_path / "again") == manifest


def test_what_git_archive_builds_is_taken(tmp_path: Path) -> None:
    """It writes the commit as the comment of the zip."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "good.py").write_text("x = 1\n")
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    archive = subprocess.run([*git, "archive", "--format=zip", "HEAD"], check=True, stdout=subprocess.PIPE).stdout
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        assert len(reader.comment) == 40
    assert list(check_and_extract(archive, tmp_path / "out")) == ["good.py"]


def test_the_mode_gives_nothing_but_execution(tmp_path: Path) -> None:
    check_and_extract(packed(("run.sh", b"#!"), mode=stat.S_IFREG | 0o6777), tmp_path / "there")
    assert stat.S_IMODE((tmp_path / "there/run.sh").stat().st_mode) & ~0o755 == 0


def test_the_digest_tells_the_contents(tmp_path: Path) -> None:
    numbers = itertools.count()

    def digest(*entries: tuple[str, bytes], mode: int = 0) -> str:
        return digest_of(check_and_extract(packed(*entries, mode=mode), tmp_path / str(next(numbers))))

    first = digest(("a", b"1"), ("b", b"2"))
    assert digest(("b", b"2"), ("a", b"1")) == first
    others = [
        digest(("a", b"2"), ("b", b"1")),
        digest(("a", b"12"), ("b", b"")),
        digest(("ab", b"12")),
        digest(("a", b"1"), ("b", b"2"), mode=stat.S_IFREG | 0o755),
    ]
    assert len({first, *others}) == 5


def test_a_failure_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    check_and_extract(packed(("a.py", b"1")), there)
    with pytest.raises(FileExistsError):
        check_and_extract(packed(("a.py", b"2")), there)
    assert (there / "a.py").read_bytes() == b"1"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swarm.code_snapshots.extract._write", full)
    with pytest.raises(OSError, match="No space"):
        check_and_extract(packed(("a.py", b"2")), tmp_path / "new")
    assert everything(tmp_path) == ["there", "there/a.py"]


NAMES = st.text(st.sampled_from("ab./\\:\0é\ud800 ~*"), max_size=12) | st.text(max_size=6)


@settings(max_examples=300)
@given(name=NAMES)
def test_a_name_that_passes_stays_inside(name: str) -> None:
    if not check_name(name):
        inside = Path("/target")
        path = Path(f"{inside}/{name}")
        assert path.is_relative_to(inside) and path != inside
        assert ".." not in path.parts and path.as_posix() == f"/target/{name.removesuffix('/')}"


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    good = packed(("pkg/a.py", b"print(1)\n" * 20), ("pkg/b.py", b""), ("c.txt", b"c" * 300))
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 22, 60]))
    root = tmp_path_factory.mktemp("fuzz")
    target = root / "outer/target"
    try:
        manifest = check_and_extract(bytes(damaged[: len(damaged) - cut]), target, LIMITS)
    except RequestError as exc:
        assert exc.code == "bad_archive"
        assert everything(root) in ([], ["outer"])
    else:
        assert manifest_of(target) == manifest
        assert [path.name for path in (root / "outer").iterdir()] == ["target"]
        assert [path.name for path in root.iterdir()] == ["outer"]


@settings(max_examples=60)
@given(
    files=st.dictionaries(
        st.lists(st.text(st.sampled_from("abcé .-_"), min_size=1, max_size=6), min_size=1, max_size=4).map("/".join),
        st.binary(max_size=200),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_packed_here_comes_out_there(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("round")
    code = root / "code"
    written: dict[str, bytes] = {}
    for name, content in files.items():
        path = code / name
        if check_name(name) or path.is_dir() or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written[name] = content
    if not written:
        return
    there = root / "there"
    check_and_extract(build_archive(tracked(code)).content, there)
    assert {
        path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()
    } == written
