#!/usr/bin/env bash
# Starts a run on GPU nodes of Kubernetes, or goes on with it (scripts/gpu/k8s.yaml).
#   scripts/gpu/k8s.sh --name run --hosts 2 --devices 8 --image REGISTRY/lmjax --config configs/pretrain/llama_1b.py \
#     --workdir gs://bucket/run --tokenizer gs://bucket/tokenizer --shards gs://bucket/shards [--config.train.steps=1000 …] \
#     [--namespace N] [--flags "--xla_…=…"] [--dry-run]
# --devices: GPUs of a node; --flags: of XLA, which win over lmjax/xla_flags.py. The image is made by `docker build -t REGISTRY/lmjax .`; the config lies in it.

# shellcheck source=tpu/common.sh
source "$(dirname "$0")/../../tpu/common.sh"
cd "$(dirname "$0")/../.."
parse "$@"
need name "of the job"
need hosts "how many nodes"
need devices "GPUs of a node"
need image "made from the Dockerfile"
need_run
apply scripts/gpu/k8s.yaml gpu
