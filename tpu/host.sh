#!/usr/bin/env bash
# On a host of a TPU VM, in the copied checkout: makes the environment once, then runs lmjax.
#   tpu/host.sh new|ENVIRONMENT WORDS…
set -euo pipefail
cd "$(dirname "$0")/.."
environment="$1"
shift
if [ "$environment" = new ]; then
  if ! command -v python3.12 >/dev/null && ! command -v python3.11 >/dev/null; then # the images have Python 3.10
    sudo apt-get -qq update && sudo apt-get -qq install -y python3.11 python3.11-venv
  fi
  VENV="$HOME/.lmjax-venv" EXTRAS=gcs,tpu
  # shellcheck source=scripts/setup.sh
  source scripts/setup.sh
else
  [ -x "$environment/bin/python" ] || { echo "tpu/host.sh: $environment is no environment on $(hostname)" >&2 && exit 2; }
  export PATH="$environment/bin:$PATH"
fi
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
exec python -m lmjax.cli "$@"
