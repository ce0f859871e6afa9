#!/usr/bin/env bash
# Resolve cpu.lock and gpu.lock anew. cpu.lock leaves torch out: `make setup` installs its CPU build first.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
"$uv" pip compile requirements/cpu.in pyproject.toml --extra dev --extra docs --extra research --override requirements/overrides.txt \
    --python-version 3.11 --python-platform linux --no-header --no-annotate --upgrade ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} \
    -q -o requirements/cpu.lock.new
{ echo "# Full CPU set for 'make setup', installed with --no-deps after torch. Made by 'make lock'."
  grep -v '^torch==' requirements/cpu.lock.new; } > requirements/cpu.lock
rm requirements/cpu.lock.new

# What both sets have is as in cpu.lock wherever verl's pins for GPUs allow it.
cp requirements/cpu.lock requirements/gpu.lock.new
"$uv" pip compile pyproject.toml --extra gpu --python-version 3.11 --python-platform linux --no-header --no-annotate \
    -q -o requirements/gpu.lock.new
{ echo "# Full GPU set: pip install -c requirements/gpu.lock '.[gpu]'. Made by 'make lock', after cpu.lock."
  grep -v '^#' requirements/gpu.lock.new; } > requirements/gpu.lock
rm requirements/gpu.lock.new
