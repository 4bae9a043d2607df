#!/usr/bin/env bash
# Brings back a run whose TPU VM was preempted: deletes what is left, creates it again, goes on from the newest checkpoint.
#   tpu/recover.sh (all arguments of tpu/create.sh and tpu/launch.sh)
# Nothing is remembered in between: the arguments say what to create and what to run. `lmjax plan` says how often to save
# (config.checkpoint.every) at a given rate of preemptions.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
parse "$@"
need_pod
need type "the slice to create again, such as v5p-64"
need_run
check_gcloud
place
shell="${BASH:-bash}"
if [ -n "$DRY_RUN" ]; then
  echo "+ (if $NAME is not READY:)"
  "$shell" tpu/delete.sh "$@"
  "$shell" tpu/create.sh "$@"
else
  now="$(state)"
  echo "$NAME: $now"
  case "$now" in
    READY) ;;
    ABSENT | PREEMPTED | TERMINATED | STOPPED | SUSPENDED)
      "$shell" tpu/delete.sh "$@"
      "$shell" tpu/create.sh "$@"
      ;;
    *) fail "$NAME is in state $now: try again when it has settled" ;;
  esac
fi
"$shell" tpu/launch.sh "$@"
