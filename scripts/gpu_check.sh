#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: kernels against the reference, bfloat16 training, throughput and MFU. Arguments pass to
# scripts/bench_gpu.py. With PYTHON it runs by that interpreter, which has JAX for the GPU already; else it sets up its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${PYTHON:-}" ]; then
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
else
  EXTRAS="${EXTRAS:-cuda}" VENV="${VENV:-.venv-cuda}"
  source scripts/setup.sh
  PYTHON=python
fi
# A JAX that takes the memory as it needs it: several trainings follow one another in one process.
XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}" exec "$PYTHON" scripts/bench_gpu.py "$@"
