#!/usr/bin/env bash
# Creates a TPU VM, and waits until it is ready. One that is there already is left as it is.
#   tpu/create.sh --name pod --zone us-east5-a --type v5p-64 [--spot] [--queued] [--version IMAGE] [--project P] [--dry-run]
# --queued asks through a queued resource of the same name, which waits for capacity; --spot costs less and may be preempted.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
parse "$@"
need_pod
need type "the slice, such as v5p-64 or v5litepod-256"
if [ -z "$VERSION" ]; then
  case "$TYPE" in
    v4-*) VERSION=tpu-ubuntu2204-base ;;
    v5litepod-*) VERSION=v2-alpha-tpuv5-lite ;;
    v5p-*) VERSION=v2-alpha-tpuv5 ;;
    v6e-*) VERSION=v2-alpha-tpuv6e ;;
    *) die "--version is missing: the image for $TYPE is not known here" ;;
  esac
fi
check_gcloud
place
[ -z "$SPOT" ] || PLACE+=(--spot)

if [ -z "$DRY_RUN" ]; then
  PLACE_ALL=("${PLACE[@]}")
  place
  now="$(state)"
  case "$now" in
    READY) echo "$NAME is ready" && exit 0 ;;
    ABSENT | CREATING) ;;
    *) die "$NAME is there in state $now: use tpu/recover.sh, or delete it" ;;
  esac
  PLACE=("${PLACE_ALL[@]}")
fi
if [ -z "$QUEUED" ]; then
  run gcloud compute tpus tpu-vm create "$NAME" "${PLACE[@]}" --accelerator-type "$TYPE" --version "$VERSION"
  exit 0
fi
run gcloud compute tpus queued-resources create "$NAME" --node-id "$NAME" "${PLACE[@]}" --accelerator-type "$TYPE" \
  --runtime-version "$VERSION"
[ -z "$DRY_RUN" ] || { echo "+ (wait until it is ACTIVE)" && exit 0; }
place
before=""
while true; do
  now="$(queued_state)"
  [ "$now" = "$before" ] || echo "$(date +%T) $NAME: $now"
  case "$now" in
    ACTIVE) exit 0 ;;
    FAILED | SUSPENDED | ABSENT) fail "the request ended in state $now: see \`gcloud compute tpus queued-resources describe $NAME\`" ;;
  esac
  before="$now"
  sleep "$POLL_S"
done
