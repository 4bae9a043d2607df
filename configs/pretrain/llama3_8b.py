"""Llama 3 8B (Dubey et al., 2024, arXiv 2407.21783), on 1 trillion tokens of your own shards.

Command   lmjax train --config configs/pretrain/llama3_8b.py --workdir /shared/llama3_8b --distributed \\
              --config.tokenizer=DIR --config.data.shards=DIR
Hardware  made for a slice of 64 or more TPU chips; `lmjax plan` on this file gives parameters, FLOPs and memory
Reached   not yet trained to the end
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The published shape; every weight sharded over every device, each layer recomputed in the backward pass."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 128_256,
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
                "learning_rate": 3e-4,
                "schedule": "cosine",
                "warmup_steps": 2000,
                "final_ratio": 0.1,
                "weight_decay": 0.1,
            },
            "train": {"steps": 240_000, "batch_size": 512, "precision": "bfloat16", "z_loss": 1e-4, "loss_chunk": 1024},
            "eval": {"every": 2000, "rows": 512},
            "checkpoint": {"every": 1000, "keep": 2, "keep_every": 20_000},
        }
    )
