#!/usr/bin/env bash
# Creates a TPU VM, and waits until it is ready. One that is there already is left as it is, one that is being made is waited for.
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

wait_until() { # LOOK STATE: until it finds that state
  local now before=""
  TRIES="${LMJAX_TRIES:-$PATIENT_TRIES}"
  while true; do
    now="$("$1")"
    [ "$now" = "$before" ] || echo "$(date +%T) $NAME: $now"
    case "$now" in
      "$2") return ;;
      FAILED | SUSPENDED | ABSENT | PREEMPTED | TERMINATED | STOPPED)
        fail "what was asked for ended in state $now: \`gcloud compute tpus\` describes it, tpu/delete.sh clears it away"
        ;;
    esac
    before="$now"
    sleep "$POLL_S"
  done
}

now=ABSENT request=ABSENT
if [ -z "$DRY_RUN" ]; then
  now="$(state)"
  [ -z "$QUEUED" ] || request="$(queued_state)"
fi
case "$now" in
  READY) echo "$NAME is ready" && exit 0 ;;
  ABSENT | CREATING) ;;
  *) die "$NAME is there in state $now: use tpu/recover.sh, or delete it" ;;
esac
ask=(create "$NAME" "${PLACE[@]}" --accelerator-type "$TYPE")
[ -z "$SPOT" ] || ask+=(--spot)
if [ "$request" = ABSENT ] && [ "$now" = CREATING ]; then # asked for before, without a queue
  wait_until state READY
elif [ -z "$QUEUED" ]; then
  run gcloud compute tpus tpu-vm "${ask[@]}" --version "$VERSION"
else
  [ "$request" != ABSENT ] || run gcloud compute tpus queued-resources "${ask[@]}" --node-id "$NAME" --runtime-version "$VERSION"
  [ -z "$DRY_RUN" ] || { echo "+ (wait until it is ACTIVE)" && exit 0; }
  wait_until queued_state ACTIVE
fi
