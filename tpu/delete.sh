#!/usr/bin/env bash
# Deletes a TPU VM, and its queued resource if it has one. What the run saved stays in its workdir.
#   tpu/delete.sh --name pod --zone us-east5-a [--project P] [--dry-run]

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
parse "$@"
need_pod
check_gcloud
place
if [ -n "$DRY_RUN" ]; then
  echo "+ (the queued resource $NAME if there is one, else the TPU VM)"
  run gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" --force --quiet
  run gcloud compute tpus tpu-vm delete "$NAME" "${PLACE[@]}" --quiet
elif [ "$(queued_state)" != ABSENT ]; then
  run gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" --force --quiet
elif [ "$(state)" != ABSENT ]; then
  run gcloud compute tpus tpu-vm delete "$NAME" "${PLACE[@]}" --quiet
else
  echo "there is no $NAME"
fi
