"""Our server of vLLM inside verl, in a process of its own: importing vLLM takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.verl.cpu import vllm_metadata

ROOT = Path(__file__).parents[3]
STRETCHED = """
from types import SimpleNamespace
from adapters.verl.lasting import SwarmVllmServer

server = SwarmVllmServer.__new__(SwarmVllmServer)
server.config = SimpleNamespace(max_model_len=300, enable_chunked_prefill=True)
server.model_config = SimpleNamespace(hf_config=SimpleNamespace(max_position_embeddings=149))
server._validate_configs()
print(server.config.max_model_len)
"""


@pytest.mark.slow
def test_a_context_that_scaled_rotary_embeddings_stretch_is_left_to_vllm(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    shim = vllm_metadata(tmp_path)
    paths = [str(ROOT), *([str(shim)] if shim else []), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", STRETCHED],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "300"
