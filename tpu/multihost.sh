#!/usr/bin/env bash
# Runs a command on all hosts of a TPU VM at once. The output of host i goes to LOGS/host-i.log; one that fails stops all.
#   tpu/multihost.sh --name pod --zone us-east5-a [--logs DIR] [--project P] [--dry-run] -- COMMAND
# Ends with 0 when all did, with 2 when a host named a mistake of yours, else with 1. Ctrl-C asks the hosts to save and end.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
GRACE_S="${LMJAX_GRACE_S:-10}" # from asking the hosts to end until they are killed
parse "$@"
need_pod
[ "${#REST[@]}" -gt 0 ] || die "no command: give it behind --"
check_gcloud
place
LOGS="${LOGS:-logs/$NAME}"

ssh_to() { # HOST COMMAND
  gcloud compute tpus tpu-vm ssh "$NAME" "${PLACE[@]}" --worker="$1" --command="$2"
}

# A session of its own on the host: its number is that of the process group, which is how it is stopped.
command="setsid --wait bash -c $(quoted "echo \$\$ >~/.lmjax-group; ${REST[*]}")"
if [ -n "$DRY_RUN" ]; then
  echo "+ (on each host i, its output to $LOGS/host-i.log; one that fails stops all)"
  run gcloud compute tpus tpu-vm ssh "$NAME" "${PLACE[@]}" --worker=i --command="$command"
  exit 0
fi
now="$(state)"
[ "$now" = READY ] || die "$NAME is not ready but $now"
hosts="$(gcloud compute tpus tpu-vm describe "$NAME" "${PLACE[@]}" --format=json |
  python3 -c 'import json, sys; print(len(json.load(sys.stdin)["networkEndpoints"]))')"
mkdir -p "$LOGS"
rm -f "$LOGS"/host-*.code
echo "$hosts host(s); logs in $LOGS"

stop() { # SIGNAL…: to the command on every host, as far as they can still be reached
  local host pids=()
  for ((host = 0; host < hosts; host++)); do
    [ ! -f "$LOGS/host-$host.code" ] || continue
    ssh_to "$host" "kill -$1 -- -\$(cat ~/.lmjax-group)" >/dev/null 2>&1 &
    pids+=($!)
  done
  wait ${pids[@]+"${pids[@]}"} || true
}

running() { # how many hosts have not ended
  local host count=0
  for ((host = 0; host < hosts; host++)); do
    [ -f "$LOGS/host-$host.code" ] || count=$((count + 1))
  done
  echo "$count"
}

trap 'echo "asking the hosts to save and end"; stop TERM' INT TERM
locals=()
for ((host = 0; host < hosts; host++)); do
  (
    trap '' INT # the hosts are asked by `stop`
    code=0
    ssh_to "$host" "$command" >"$LOGS/host-$host.log" 2>&1 </dev/null || code=$?
    echo "$code" >"$LOGS/host-$host.code"
  ) &
  locals+=($!)
done

failed="" code=0
while [ "$(running)" -gt 0 ] && [ -z "$failed" ]; do
  sleep 1 & # in the background: a signal is answered at once
  wait $! || true
  for ((host = 0; host < hosts; host++)); do
    if [ -s "$LOGS/host-$host.code" ] && [ "$(cat "$LOGS/host-$host.code")" != 0 ]; then failed="$host" && break; fi
  done
done
for ((host = 0; host < hosts; host++)); do # of several that ended together, a mistake explains the most
  if [ -s "$LOGS/host-$host.code" ] && [ "$(cat "$LOGS/host-$host.code")" = 2 ]; then failed="$host"; fi
done
if [ -n "$failed" ]; then
  code="$(cat "$LOGS/host-$failed.code")"
  echo "host $failed ended with $code:" >&2
  { grep '^lmjax ' "$LOGS/host-$failed.log" || tail -n 5 "$LOGS/host-$failed.log"; } | sed 's/^/  /' >&2
  if [ "$(running)" -gt 0 ]; then
    echo "stopping the others" >&2
    stop TERM
    for ((second = 0; second < GRACE_S && $(running) > 0; second++)); do sleep 1; done
    stop KILL
    # a host that cannot be reached any more does not end its connection by itself
    for ((second = 0; second < GRACE_S && $(running) > 0; second++)); do sleep 1; done
    kill ${locals[@]+"${locals[@]}"} 2>/dev/null || true
  fi
  [ "$code" = 2 ] || code=1
fi
wait || true
[ "$code" != 0 ] || echo "all hosts ended well"
exit "$code"
