"""Requests over HTTP get the adapter that was synced last, by a name of its own; or that of a kept version, which vLLM
holds as it is on disk."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from adapters.verl.lora import ROOM, PolicyAdapter, targets_by_their_name
from adapters.verl.replicas import VllmServers
from swarm.errors import ConfigError
from swarm.kept_adapters import BASE, MOST_KEPT, adapter_folder, kept_model

MODEL = "/models/tiny"
#: A file with one tensor of two bytes, as safetensors writes it.
HEADER = '{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little").decode() + HEADER + "ab"


class Request(NamedTuple):
    """vLLM's too."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Asked(SimpleNamespace):
    """A request; as vLLM's it may be known weakly."""


class Serving:
    """vLLM's class."""

    async def _check_model(self, request: Any) -> Any:
        return f"vLLM looked for {request.model}"

    def _maybe_get_adapters(self, request: Any, supports_default_mm_loras: bool = False) -> Any:
        raise AssertionError("it looks up the adapter itself")

    def create_error_response(self, message: str, kind: str, status: int, param: str) -> Any:
        return status, message

    def chat(self, model: str = MODEL) -> Any:
        return self._maybe_get_adapters(SimpleNamespace(model=model), supports_default_mm_loras=True)

    def complete(self, model: str = MODEL) -> Any:
        return self._maybe_get_adapters(SimpleNamespace(model=model))

    async def check(self, version: int) -> Any:
        return await self._check_model(Asked(model=kept_model(MODEL, version)))

    async def ask(self, version: int) -> Any:
        assert await self.check(version) is None
        return self.complete(kept_model(MODEL, version))


class Engine:
    """vLLM's, with the adapters that it holds by their numbers."""

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}
        self.output_processor = SimpleNamespace(request_states=dict[str, Any]())

    async def add_lora(self, request: Request) -> None:
        if not (Path(request.lora_path) / "adapter_model.safetensors").stat().st_size:
            raise ValueError(f"no tensors in {request.lora_path}")
        assert request.lora_int_id not in self.held
        self.held[request.lora_int_id] = request

    async def remove_lora(self, number: int) -> None:
        del self.held[number]


def keep(run_dir: Path, version: int, content: str = WEIGHTS) -> None:
    folder = adapter_folder(run_dir, version)
    folder.mkdir(parents=True, exist_ok=True)
    (file := folder / "new").write_text(content)
    file.rename(folder / "adapter_model.safetensors")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of verl and vLLM, which take seconds to import."""
    utils = SimpleNamespace(VLLM_LORA_INT_ID=123, VLLM_LORA_PATH="nowhere")
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))


def test_after_each_sync_there_is_a_new_name_with_verls_number() -> None:
    class Ours(Serving):
        pass

    adapter, serving = PolicyAdapter(Ours, Engine(), Path()), Ours()
    assert serving.complete() is None, "before the first sync vLLM has none"
    # the trainer may go back
    for number, version in enumerate((0, 1, 0), start=1):
        adapter.change(version)
        assert serving.chat() == serving.complete() == (f"policy@{version}.{number}", 123, "nowhere")


@pytest.mark.parametrize("adapter", [None, PolicyAdapter(type("Other", (Serving,), {}), Engine(), Path())])
def test_a_sync_changes_the_adapter_where_there_is_one(monkeypatch: pytest.MonkeyPatch, adapter: Any) -> None:
    changes: list[int] = []
    if adapter is not None:
        monkeypatch.setattr(adapter, "change", changes.append)
    server = SimpleNamespace(swarm_adapter=adapter, global_steps=5)

    def on_servers(work: Callable[[Any], None]) -> None:
        work(server)

    servers: Any = SimpleNamespace(_on_servers=on_servers)
    VllmServers.weights_synced(servers)
    assert changes == ([] if adapter is None else [5])


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Any, Engine]:
    """vLLM's class with the newest adapter, of version 9, and its engine."""
    ours, engine = type("Ours", (Serving,), {}), Engine()
    PolicyAdapter(ours, engine, tmp_path).change(9)
    return ours(), engine


@pytest.mark.anyio
async def test_each_version_has_a_name_and_a_number_of_its_own(sides: tuple[Any, Engine], tmp_path: Path) -> None:
    serving, engine = sides
    keep(tmp_path, 3)
    kept = await serving.ask(3)
    assert kept == ("kept@3.1", 124, str(adapter_folder(tmp_path, 3)))
    assert await serving.ask(3) is kept and engine.held == {124: kept}, "it is loaded once"
    assert await serving.ask(BASE) is None
    assert serving.complete() == ("policy@9.1", 123, "nowhere")
    assert await serving._check_model(SimpleNamespace(model="other")) == "vLLM looked for other"


@pytest.mark.anyio
async def test_other_weights_under_a_number_are_loaded_anew(sides: tuple[Any, Engine], tmp_path: Path) -> None:
    serving, engine = sides
    keep(tmp_path, 3)
    before = await serving.ask(3)
    keep(tmp_path, 3, f"{WEIGHTS[:-2]}cd")
    assert await serving.ask(3) == ("kept@3.2", 125, before.lora_path)
    assert list(engine.held) == [125]


@pytest.mark.anyio
async def test_what_cannot_be_loaded_is_refused_and_names_no_folder(sides: tuple[Any, Engine], tmp_path: Path) -> None:
    serving, engine = sides
    keep(tmp_path, 4, content="")
    for version, why in ((3, "FileNotFoundError"), (4, "ValueError")):
        status, message = await serving.check(version)
        assert status == 404 and why in message and str(tmp_path) not in message
        with pytest.raises(KeyError):
            serving.complete(kept_model(MODEL, version))
    keep(tmp_path, 4)
    assert (await serving.ask(4)).lora_name == "kept@4.2" and len(engine.held) == 1


@pytest.mark.anyio
async def test_as_many_are_held_as_there_is_room_for(sides: tuple[Any, Engine], tmp_path: Path) -> None:
    serving, engine = sides
    versions = range(1, MOST_KEPT + 3)
    for version in versions:
        keep(tmp_path, version)
    assert ROOM > MOST_KEPT + 1
    held = [await serving.ask(version) for version in versions[:MOST_KEPT]]
    running = engine.output_processor.request_states
    # an answer of the one that is to go is not taken from it: an idle one goes
    running["chat"] = SimpleNamespace(lora_name=held[0].lora_name)
    next_one = await serving.ask(versions[MOST_KEPT])
    assert list(engine.held.values()) == [held[0], *held[2:], next_one]
    running |= {str(number): SimpleNamespace(lora_name=of.lora_name) for number, of in enumerate([*held[2:], next_one])}
    # later there may be room
    assert (await serving.check(versions[-1]))[0] == 409
    running.clear()
    last = await serving.ask(versions[-1])
    assert list(engine.held.values()) == [*held[2:], next_one, last], "the one that was asked for least lately goes"


@pytest.mark.anyio
async def test_a_request_on_its_way_into_vllm_keeps_its_adapter(sides: tuple[Any, Engine], tmp_path: Path) -> None:
    serving, _ = sides
    for version in range(MOST_KEPT + 1):
        keep(tmp_path, version + 1)
    request = Asked(model=kept_model(MODEL, 1))
    assert await serving._check_model(request) is None
    for version in range(MOST_KEPT):
        await serving.ask(version + 2)
    assert serving._maybe_get_adapters(request).lora_name == "kept@1.1"
    keep(tmp_path, 1, f"{WEIGHTS[:-2]}cd")
    assert (await serving.check(1))[0] == 409, "its answer is sampled with these"
    del request
    assert (await serving.ask(1)).lora_name.startswith("kept@1.")


@pytest.mark.anyio
async def test_an_adapter_that_is_held_outlives_its_folder(sides: tuple[Any, Engine], tmp_path: Path) -> None:
    serving, _ = sides
    keep(tmp_path, 3)
    kept = await serving.ask(3)
    shutil.rmtree(adapter_folder(tmp_path, 3))
    assert await serving.ask(3) is kept


@pytest.mark.anyio
async def test_an_adapter_that_an_engine_in_trouble_does_not_load_is_tried_again(
    sides: tuple[Any, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, engine = sides
    keep(tmp_path, 3)

    async def fails(request: Request) -> None:
        raise RuntimeError("Call to add_lora method failed: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "add_lora", fails)
        assert (await serving.check(3))[0] == 409
    assert await serving.ask(3)


@pytest.mark.slow
def test_layers_that_the_model_does_not_have_are_named_by_the_jobs_field() -> None:
    peft = pytest.importorskip("peft", reason="needs the cpu or gpu extra")
    torch = pytest.importorskip("torch", reason="needs the cpu or gpu extra")
    for target, named in (("q_prjo", "q_prjo"), ("1", "LayerNorm")):
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        adapter = peft.LoraConfig(target_modules=[target])
        with pytest.raises(ConfigError, match=rf"^job\.lora\.targets: Target module.*{named}"), targets_by_their_name():
            peft.get_peft_model(layers, adapter)
    with pytest.raises(ValueError, match="another"), targets_by_their_name():
        raise ValueError("another mistake")
