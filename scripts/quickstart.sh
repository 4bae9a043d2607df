#!/usr/bin/env bash
# Sets everything up, then runs `lmjax quickstart`: raw text → … → a model that writes. Arguments pass through.
set -euo pipefail
EXTRAS="${EXTRAS:-notebook}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec lmjax quickstart "$@"
