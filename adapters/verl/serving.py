"""``serve_model``: a model as it is, answered by vLLM alone, such as the incumbent of a route."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from adapters.verl import INSTALL
from adapters.verl.config import resolve_device
from adapters.verl.cpu import KV_BLOCK_TOKENS, UNIPROCESS_EXECUTOR, cpu_environment
from swarm.errors import ConfigError
from swarm.job import TrainJob

_PR_SET_PDEATHSIG = 1
#: vLLM puts sockets at ``<temp>/<uuid>``; Unix allows 107 characters.
_LONGEST_TEMP = 107 - len("/00000000-0000-0000-0000-000000000000")
#: Arguments of a model that lies in several processes.
_SPLITS = ("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size")


def serve_model(
    model: str,
    name: str,
    address: tuple[str, int],
    folder: Path,
    *,
    max_model_len: int | None = None,
    max_new_tokens: int | None = None,
    arguments: Sequence[str] = (),
    ends_with_parent: bool = False,
) -> NoReturn:
    """Become ``vllm serve``.

    Args:
        model: a path, or the name of a hub's model.
        folder: where vLLM's metadata may be written, on a CPU.
        max_model_len: tokens of prompt and answer together; ``None``: what the model takes.
        max_new_tokens: of an answer whose request does not say how many.
        arguments: more of them for ``vllm serve``.
        ends_with_parent: SIGTERM comes when the process that started this one ends (Linux).

    Raises:
        ConfigError: vLLM is not installed.
    """
    vllm = Path(sys.executable).with_name("vllm")
    if not vllm.is_file():
        raise ConfigError(f"vLLM is not installed here: {INSTALL}")
    host, port = address
    # it asks for no key, and by itself lets every page in a browser of this machine use it
    options = ["--served-model-name", name, "--host", host, "--port", str(port), "--allowed-origins", "[]"]
    if max_model_len is not None:
        options += ["--max-model-len", str(max_model_len)]
    if max_new_tokens is not None:
        options += ["--override-generation-config", json.dumps({"max_new_tokens": max_new_tokens})]
    # as the engine's vLLM: no word to its makers
    environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ}
    # transformers reads its own docstrings
    environment.pop("PYTHONOPTIMIZE", None)
    if len(tempfile.gettempdir()) > _LONGEST_TEMP:
        environment.setdefault("VLLM_RPC_BASE_PATH", "/tmp")
    if resolve_device(TrainJob(model=model)) == "cpu":
        folder.mkdir(parents=True, exist_ok=True)
        variables = cpu_environment(folder.resolve(), "always")
        # what the operator has set wins, as at the engine's vLLM, which needs the metadata
        environment = {**variables, **environment}
        if "PYTHONPATH" in variables:
            environment["PYTHONPATH"] = variables["PYTHONPATH"]
        options += ["--dtype", "float32", "--enforce-eager", "--block-size", str(KV_BLOCK_TOKENS)]
        if not any(argument.replace("_", "-").startswith(_SPLITS) for argument in arguments):
            # by itself vLLM takes two processes on a CPU, each of which waits for the other in a loop that takes a core
            options += ["--distributed-executor-backend", UNIPROCESS_EXECUTOR]
    if ends_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execve(vllm, [str(vllm), "serve", model, *options, *arguments], environment)
