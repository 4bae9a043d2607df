#!/usr/bin/env bash
# Starts a run on all hosts of a TPU VM, or goes on with it: copies this checkout there, makes the environment, trains.
#   tpu/launch.sh --name pod --zone us-east5-a --config configs/pretrain/llama_1b.py --workdir gs://bucket/run \
#     --tokenizer gs://bucket/tokenizer --shards gs://bucket/shards [--config.train.steps=1000 …] [--logs DIR] \
#     [--environment DIR] [--flags "--xla_…=…"] [--project P] [--dry-run]
# What git does not track is copied from lmjax, configs, scripts, tpu and constraints alone, and the config.
# --environment names a virtual environment that the hosts have already, --flags some of XLA's that win over lmjax/xla_flags.py. Ends when the run ends, with its exit code.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
parse "$@"
need_pod
need_run
git rev-parse --is-inside-work-tree >/dev/null 2>&1 || die "this is no git checkout: its files are what is copied"
check_gcloud
place
train_words
case "$WORKDIR" in
  gs://*) [ -n "$DRY_RUN" ] || gcloud storage ls "$(echo "$WORKDIR" | cut -d/ -f1-3)" >/dev/null 2>&1 ||
    die "--workdir: no access to the bucket of $WORKDIR" ;;
esac
if [ -z "$DRY_RUN" ]; then
  now="$(state)"
  [ "$now" = READY ] || die "$NAME is not ready but $now: tpu/create.sh makes it, tpu/recover.sh brings it back"
fi

archive="$(mktemp -d)/lmjax.tar.gz"
trap 'rm -rf "$(dirname "$archive")"' EXIT
files="$(dirname "$archive")/files"
untracked=(lmjax configs scripts tpu constraints) # elsewhere lie data and checkpoints
{
  git ls-files -z --cached
  git ls-files -z --others --exclude-standard -- "${untracked[@]}"
} | while IFS= read -r -d '' file; do
  if [ -e "$file" ]; then printf '%s\n' "$file"; fi
done >"$files"
grep -qxF -e "$CONFIG" "$files" || echo "$CONFIG" >>"$files"
echo "+ ($(wc -l <"$files" | tr -d ' ') files of this checkout, untracked ones of ${untracked[*]} alone, at $(git describe --always --dirty=+dirty --exclude='*'))"
tar -czf "$archive" -T "$files"
run gcloud compute tpus tpu-vm scp "$archive" "$NAME:lmjax.tar.gz" "${PLACE[@]}" --worker=all

flags="$(xla_flags tpu)"
there="rm -rf lmjax && mkdir lmjax && tar -xzf lmjax.tar.gz -C lmjax && cd lmjax"
there="$there && exec env $(quoted "LIBTPU_INIT_ARGS=$flags") bash tpu/host.sh $(quoted "${ENVIRONMENT:-new}" "${WORDS[@]}")"
arguments=(--name "$NAME" "${PLACE[@]}" --logs "${LOGS:-logs/$NAME}")
[ -z "$DRY_RUN" ] || arguments+=(--dry-run)
"${BASH:-bash}" tpu/multihost.sh "${arguments[@]}" -- "$there"
