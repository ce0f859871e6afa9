"""The model that users have today: SmolLM2-135M as it is, behind an OpenAI-compatible address.

python incumbent.py --port 9000
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from adapters.models.resolve import resolve_model
from adapters.verl.cpu import cpu_environment

MODEL = "smollm2-135m"
#: Of an answer, in tokens, as `max_response_length` in `config.yaml`: the app does not say.
ANSWER = {"max_new_tokens": 48}


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve SmolLM2-135M as it is.")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/incumbent"), help="folder of what vLLM needs here")
    arguments = parser.parse_args()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    options = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(arguments.port)]
    options += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    options += ["--override-generation-config", json.dumps(ANSWER)]
    vllm = Path(sys.executable).with_name("vllm")
    environment = os.environ | cpu_environment(arguments.run_dir.resolve(), "always")
    os.execve(vllm, [str(vllm), "serve", resolve_model(MODEL), *options], environment)


if __name__ == "__main__":
    main()
