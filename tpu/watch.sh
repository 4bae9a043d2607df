#!/usr/bin/env bash
# Watches a TPU VM and tells each change of its state; ends with 1 when it is lost.
#   tpu/watch.sh --name pod --zone us-east5-a [--project P] [--dry-run]
#   tpu/watch.sh --recover (all arguments of tpu/create.sh and tpu/launch.sh)
# With --recover it starts the run, and brings it back as often as it is preempted, until it is done. A run that fails on a TPU
# that is still there is not started again. Of looks that fail, ten in a row end it.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
parse "$@"
need_pod
[ -z "$RECOVER" ] || need_run
check_gcloud
place
TRIES="${LMJAX_TRIES:-$PATIENT_TRIES}"
export LMJAX_TRIES="$TRIES" # for those that it starts
recover=("${BASH:-bash}" tpu/recover.sh "$@")
if [ -n "$DRY_RUN" ]; then
  echo "+ (every $POLL_S s:) gcloud compute tpus tpu-vm describe $NAME $(quoted "${PLACE[@]}")"
  [ -z "$RECOVER" ] || "${recover[@]}"
  exit 0
fi
before=""
while true; do
  if [ -n "$RECOVER" ]; then
    code=0
    "${recover[@]}" || code=$?
    [ "$code" != 0 ] || exit 0
    [ "$code" != 2 ] || exit 2
  fi
  now="$(state)"
  [ "$now" = "$before" ] || echo "$(date +%T) $NAME: $now"
  before="$now"
  case "$now" in
    ABSENT | PREEMPTED | TERMINATED | STOPPED | SUSPENDED) [ -n "$RECOVER" ] || exit 1 ;;
    READY) [ -z "$RECOVER" ] || fail "the run failed, and $NAME is there: see its logs" ;;
  esac
  sleep "$POLL_S"
done
