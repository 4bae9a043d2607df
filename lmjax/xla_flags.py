"""Flags of XLA by platform, each with its reason: communication beside computing.

    python -m lmjax.xla_flags tpu|gpu ["--given=--xla_…=…"]

prints what belongs in the platform's variable: the flags given, and those of the table that they do not name. The scripts that start runs
(`tpu/`, `scripts/gpu/`) pass it on. No imports of ours: any Python 3 runs this file.
"""

import argparse
from typing import NamedTuple


class Flag(NamedTuple):
    """One flag, without the leading dashes."""

    name: str
    value: str
    reason: str


# Not named: fusion of collectives into the products beside them (xla_tpu_enable_async_collective_fusion…) is on where a TPU has it, and
# libtpu refuses to compile for a v4 with it; offload of collectives to SparseCore, which gave wrong losses elsewhere (axlearn).
TABLES = {
    "tpu": (
        Flag("xla_tpu_enable_latency_hiding_scheduler", "true", "products run while weights for the next are gathered"),
        Flag("xla_enable_async_all_gather", "true", "weights over fsdp: the default from v5 on, not on v4"),
        Flag("xla_enable_async_collective_permute", "true", "stages and the ring of context: not the default on v4"),
        Flag("xla_tpu_enable_data_parallel_all_reduce_opt", "true", "between slices: gradients travel while others are computed"),
        Flag("xla_tpu_data_parallel_opt_different_sized_ops", "true", "also where the gradients differ in size"),
    ),
    "gpu": (
        Flag("xla_gpu_enable_latency_hiding_scheduler", "true", "products run while NCCL works: off by default"),
        Flag("xla_gpu_enable_while_loop_double_buffering", "true", "a scan's layer reads weights while the next one's are gathered"),
        Flag("xla_gpu_all_gather_combine_threshold_bytes", "134217728", "a layer's weights in one gather, and not several layers'"),
        Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", "134217728", "and its gradients"),
        Flag("xla_gpu_all_reduce_combine_threshold_bytes", "134217728", "and those of replicas"),
    ),
}  # fmt: skip
VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS"}  # where each platform reads them


def flags(platform: str, given: str = "") -> str:
    """What the platform's variable should hold: what is given, and behind it the table's flags that it does not name."""
    named = {word.lstrip("-").partition("=")[0] for word in given.split()}
    added = (f"--{flag.name}={flag.value}" for flag in TABLES[platform] if flag.name not in named)
    return " ".join([*given.split(), *added])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=sorted(TABLES))
    parser.add_argument("--given", default="", help="flags that go before those of the table, and win")
    arguments = parser.parse_args()
    print(flags(arguments.platform, arguments.given))
