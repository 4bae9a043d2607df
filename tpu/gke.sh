#!/usr/bin/env bash
# Starts a run on a TPU slice of Google Kubernetes Engine, or goes on with it (tpu/gke.yaml).
#   tpu/gke.sh --name run --accelerator tpu-v5-lite-podslice --topology 4x4 --hosts 4 --devices 4 --image REGISTRY/lmjax \
#     --config configs/pretrain/llama_1b.py --workdir gs://bucket/run --tokenizer gs://bucket/tokenizer \
#     --shards gs://bucket/shards [--config.train.steps=1000 …] [--slices 2] [--namespace N] [--flags "--xla_…=…"] [--dry-run]
# --devices: chips of a host; --flags: of XLA, which win over lmjax/xla_flags.py. The image is made by `docker build --build-arg JAX=tpu -t REGISTRY/lmjax .`. XPK makes the cluster
# and its node pool: `xpk cluster create --cluster NAME --tpu-type v5litepod-16 --spot`.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
parse "$@"
need name "of the job"
need accelerator "the node pool's, such as tpu-v5-lite-podslice or tpu-v5p-slice"
need topology "of the slice, such as 4x4"
need hosts "of the slice"
need devices "chips of a host"
need image "made from the Dockerfile"
[[ "$SLICES" =~ ^[1-9][0-9]*$ ]] || die "--slices must be a positive number: $SLICES"
need_run
apply tpu/gke.yaml tpu
