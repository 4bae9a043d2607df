"""Mixtral 8x7B (Jiang et al., 2024, arXiv 2401.04088): 47 billion parameters, of which a token runs through 13, on 1 trillion tokens.

Command   lmjax train --config configs/pretrain/mixtral_8x7b.py --workdir /shared/mixtral --distributed \\
              --config.tokenizer=DIR --config.data.shards=DIR
Hardware  made for a slice of 64 or more TPU chips (v5p-128); compiled for it by
              lmjax plan --config configs/pretrain/mixtral_8x7b.py --topology v5p:4x4x4
Reached   not yet trained; the table of slices in README.md says what the compiler needs
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The published shape; experts over 4 devices with a capacity, all other weights sharded over the rest."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 32_000,
                "num_layers": 32,
                "d_model": 4096,
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_dim": 128,
                "d_ff": 14_336,
                "activation": "swiglu",
                "norm": "rmsnorm",
                "norm_epsilon": 1e-5,
                "position": "rope",
                "rope_theta": 1_000_000.0,
                "tie_embeddings": False,
                "max_length": 4096,
                "moe": {"num_experts": 8, "top_k": 2, "capacity_factor": 1.25, "balance_loss": 0.02},
                "remat": "full",
                "attention_block": 512,
            },
            "data": {"seq_len": 4096},
            "mesh": {"data": 1, "fsdp": -1, "expert": 4},
            "optim": {
                "name": "adamw",
                "learning_rate": 3e-4,
                "schedule": "cosine",
                "warmup_steps": 2000,
                "final_ratio": 0.1,
                "weight_decay": 0.1,
            },
            "train": {"steps": 240_000, "batch_size": 1024, "precision": "bfloat16", "z_loss": 1e-4, "loss_chunk": 2048,
                      "accumulation": 4},
            "eval": {"every": 2000, "rows": 512},
            "checkpoint": {"every": 1000, "keep": 2, "keep_every": 20_000},
        }
    )  # fmt: skip
