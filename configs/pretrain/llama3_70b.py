"""Llama 3 70B (Dubey et al., 2024, arXiv 2407.21783), on 2 trillion tokens of your own shards.

Command   lmjax train --config configs/pretrain/llama3_70b.py --workdir /shared/llama3_70b --distributed \\
              --config.tokenizer=DIR --config.data.shards=DIR
Hardware  made for a slice of 128 or more TPU chips (v5p-256); compiled for it by
              lmjax plan --config configs/pretrain/llama3_70b.py --topology v5p:4x4x8
Reached   not yet trained; the table of slices in README.md says what the compiler needs
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The published shape; every weight sharded over every device, each layer recomputed in the backward pass."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 128_256,
                "num_layers": 80,
                "d_model": 8192,
                "num_heads": 64,
                "num_kv_heads": 8,
                "head_dim": 128,
                "d_ff": 28_672,
                "activation": "swiglu",
                "norm": "rmsnorm",
                "norm_epsilon": 1e-5,
                "position": "rope",
                "rope_theta": 500_000.0,
                "tie_embeddings": False,
                "max_length": 8192,
                "remat": "full",
                "attention_block": 512,
            },
            "data": {"seq_len": 8192},
            "mesh": {"data": 1, "fsdp": -1},
            "optim": {
                "name": "adamw",
                "learning_rate": 1.5e-4,
                "schedule": "cosine",
                "warmup_steps": 2000,
                "final_ratio": 0.1,
                "weight_decay": 0.1,
            },
            "train": {"steps": 960_000, "batch_size": 256, "precision": "bfloat16", "z_loss": 1e-4, "loss_chunk": 1024},
            "eval": {"every": 2000, "rows": 512},
            "checkpoint": {"every": 500, "keep": 2, "keep_every": 20_000},
        }
    )
