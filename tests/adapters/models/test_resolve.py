from pathlib import Path

import pytest

from adapters.models import resolve_model, weight_bytes
from adapters.models.cache import Manifest, install, record_files, staging
from swarm.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_GATEWAY_HOME", str(tmp_path / "home"))
    return tmp_path


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_known_name_is_its_cached_folder() -> None:
    with staging() as workspace:
        built = model_folder(workspace / "model")
        files = record_files(built, lambda *_: None)
        target = install(built, Manifest(name="smollm2-135m", source="PyPI x", licence="Apache-2.0", files=files))
    assert resolve_model("smollm2-135m") == str(target)


def test_a_known_name_that_is_not_pulled_says_how_to_pull_it() -> None:
    with pytest.raises(ConfigError, match="swarm-gateway models pull smollm2-135m"):
        resolve_model("smollm2-135m")


def test_a_folder_is_itself_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == str(folder)
    assert resolve_model("./tiny", tmp_path) == str(folder)


def test_a_relative_folder_starts_where_it_is_told(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "configs" / "tiny")
    assert resolve_model("tiny", tmp_path / "configs") == str(folder)


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "../model", "~/no-such-model", "~nobody-here/x", "a/b/c", "has space"]
)
def test_a_path_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model folder"):
        resolve_model(name, tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model("model.gguf", tmp_path)


def test_a_hub_name_is_left_to_the_hub(tmp_path: Path) -> None:
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct", tmp_path) == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("name", ["smollm2-136m", "SmolLM2-135m", "smolm2-135m"])
def test_a_misspelt_name_is_told_the_right_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        resolve_model(name, tmp_path)


def test_a_name_that_resembles_nothing_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model folder .*gpt2; give an existing folder") as caught:
        resolve_model("gpt2", tmp_path)
    assert "(smollm2-135m)" in caught.value.message


def test_a_path_into_an_existing_folder_is_no_hub_name(tmp_path: Path) -> None:
    model_folder(tmp_path / "models" / "tiny")
    with pytest.raises(ConfigError, match=r"there is no model folder .*models/nothere"):
        resolve_model("models/nothere", tmp_path)


def test_the_weights_of_a_folder_and_of_the_hubs_cache_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    assert weight_bytes("org/model") == 0, "nothing was downloaded"
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert weight_bytes("org/model") == 0, "but for its configuration"
    for number in (1, 2):
        (snapshot / f"model-{number}.safetensors").write_bytes(bytes(number))
    assert weight_bytes("org/model") == weight_bytes(str(snapshot)) == 3
