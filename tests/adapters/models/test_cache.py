import os
from pathlib import Path

import pytest

from adapters.models.cache import (
    Manifest,
    cached_path,
    install,
    is_intact,
    list_cached,
    models_home,
    read_manifest,
    record_files,
    staging,
)
from swarm.errors import ConfigError


def silent(*_: object) -> None:
    pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def put(name: str, content: str = "weights") -> Path:
    with staging() as workspace:
        built = workspace / "model"
        built.mkdir()
        (built / "config.json").write_text("{}")
        (built / "model.safetensors").write_text(content)
        manifest = Manifest(name=name, source="PyPI x==1", licence="MIT", files=record_files(built, silent))
        return install(built, manifest)


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def test_an_installed_model_is_listed_and_intact(home: Path) -> None:
    path = put("tiny")
    assert path == home / "tiny" == cached_path("tiny")
    assert is_intact(path, manifest_of(path), silent)
    assert [(model.name, model.bytes, model.source) for model in list_cached()] == [("tiny", 9, "PyPI x==1")]


def test_same_size_other_content_is_found(home: Path) -> None:
    (put("tiny") / "model.safetensors").write_text("WEIGHTS")
    assert cached_path("tiny") is not None
    assert not is_intact(home / "tiny", manifest_of(home / "tiny"), silent)


def test_a_truncated_file_hides_the_model(home: Path) -> None:
    (put("tiny") / "model.safetensors").write_text("w")
    assert cached_path("tiny") is None
    assert list_cached() == []


def test_a_second_install_replaces_the_first(home: Path) -> None:
    put("tiny", "old")
    put("tiny", "new")
    assert (home / "tiny" / "model.safetensors").read_text() == "new"
    assert [path.name for path in home.iterdir()] == ["tiny"]


def test_a_failed_build_leaves_nothing(home: Path) -> None:
    with pytest.raises(RuntimeError), staging() as workspace:
        (workspace / "half").write_text("x")
        raise RuntimeError
    assert list(home.iterdir()) == []


def test_what_a_dead_process_left_is_swept_and_a_living_ones_is_not(home: Path) -> None:
    home.mkdir(parents=True)
    dead, living = home / ".pull-4194399-abc", home / f".pull-{os.getpid()}-abc"
    dead.mkdir()
    living.mkdir()
    with staging():
        assert not dead.exists()
        assert living.exists()


def test_a_cache_that_cannot_be_written_says_so(home: Path) -> None:
    home.parent.mkdir()
    home.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="SWARM_GATEWAY_HOME"), staging():
        pass


def test_the_home_defaults_to_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SWARM_GATEWAY_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_home() == tmp_path / ".cache" / "swarm-gateway" / "models"
