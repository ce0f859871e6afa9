"""Requests over HTTP get the adapter that was synced last, by a name of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from adapters.verl.lora import PolicyAdapter
from adapters.verl.replicas import VllmServers


class Request(NamedTuple):
    """vLLM's too."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Serving:
    """vLLM's class."""

    def _maybe_get_adapters(self, request: Any, supports_default_mm_loras: bool = False) -> Any:
        raise AssertionError("it looks up the adapter itself")

    def chat(self) -> Any:
        return self._maybe_get_adapters("request", supports_default_mm_loras=True)

    def complete(self) -> Any:
        return self._maybe_get_adapters("request")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of verl and vLLM, which take seconds to import."""
    utils = SimpleNamespace(VLLM_LORA_INT_ID=123, VLLM_LORA_PATH="nowhere")
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))


def test_after_each_sync_there_is_a_new_name_with_verls_number() -> None:
    class Ours(Serving):
        pass

    adapter, serving = PolicyAdapter(Ours), Ours()
    assert serving.complete() is None, "before the first sync vLLM has none"
    # the trainer may go back
    for number, version in enumerate((0, 1, 0), start=1):
        adapter.change(version)
        assert serving.chat() == serving.complete() == (f"policy@{version}.{number}", 123, "nowhere")


@pytest.mark.parametrize("adapter", [None, PolicyAdapter(type("Other", (Serving,), {}))])
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
