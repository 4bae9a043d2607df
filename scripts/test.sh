#!/usr/bin/env bash
# Sets everything up, then checks the style and runs the tests. Arguments pass to pytest, but for:
#   --fast   leave out the tests marked slow
# With two cores, tests run in two processes; `-n 0` runs them in one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

selection=()
arguments=()
for argument in "$@"; do
  if [ "$argument" = "--fast" ]; then selection=(-m "not slow"); else arguments+=("$argument"); fi
done

python - <<'PY'
import importlib.metadata, platform
print("python", platform.python_version(), *(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "grain")), sep="  ")
PY
ruff check .
ruff format --check .
start=$SECONDS
if [ "${#arguments[@]}" -eq 0 ] && [ "${#selection[@]}" -eq 0 ]; then
  # The fast ones first, with their own time: a change is answered in minutes.
  pytest -n 2 --dist worksteal -m "not slow" --durations=15
  echo "fast tests: $((SECONDS - start)) s"
  pytest -n 2 --dist worksteal -m slow --durations=15
  echo "all tests: $((SECONDS - start)) s"
else
  pytest -n 2 --dist worksteal "${selection[@]}" "${arguments[@]}"
  echo "tests: $((SECONDS - start)) s"
fi
