#!/usr/bin/env bash
# Starts a run on a TPU slice of Google Kubernetes Engine, or goes on with it (tpu/gke.yaml).
#   tpu/gke.sh --name run --accelerator tpu-v5-lite-podslice --topology 4x4 --hosts 4 --devices 4 --image REGISTRY/lmjax \
#     --config configs/pretrain/llama_1b.py --workdir gs://bucket/run --tokenizer gs://bucket/tokenizer \
#     --shards gs://bucket/shards [--config.train.steps=1000 …] [--namespace N] [--dry-run]
# --devices: chips of a host. The image is made by `docker build --build-arg JAX=tpu -t REGISTRY/lmjax .`. XPK makes the cluster
# and its node pool: `xpk cluster create --cluster NAME --tpu-type v5litepod-16 --spot`.

cd "$(dirname "$0")/.."
# shellcheck source=tpu/common.sh
source tpu/common.sh
parse "$@"
need name "of the job"
need accelerator "the node pool's, such as tpu-v5-lite-podslice or tpu-v5p-slice"
need topology "of the slice, such as 4x4"
need hosts "of the slice"
need devices "chips of a host"
need image "made from the Dockerfile"
need_run
apply tpu/gke.yaml
