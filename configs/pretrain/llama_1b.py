"""A Llama of 1.2 billion parameters (the shape of Llama 3.2 1B), on 100 billion tokens of your own shards.

Command   lmjax train --config configs/pretrain/llama_1b.py --workdir runs/llama_1b \\
              --config.tokenizer=DIR --config.data.shards=DIR
Hardware  made for 8 to 64 accelerators; `lmjax plan` on this file gives parameters, FLOPs and memory
Reached   not yet trained to the end
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Grouped-query attention, SwiGLU, tied embeddings; parameters sharded over every device."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 128_256,
                "num_layers": 16,
                "d_model": 2048,
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_dim": 64,
                "d_ff": 8192,
                "activation": "swiglu",
                "norm": "rmsnorm",
                "norm_epsilon": 1e-5,
                "position": "rope",
                "rope_theta": 500_000.0,
                "tie_embeddings": True,
                "max_length": 4096,
                "remat": "block_outputs",
                "attention_block": 512,
            },
            "data": {"seq_len": 4096},
            "mesh": {"data": 1, "fsdp": -1},
            "optim": {
                "name": "adamw",
                "learning_rate": 4e-4,
                "schedule": "wsd",
                "warmup_steps": 2000,
                "decay_steps": 10_000,
                "final_ratio": 0.0,
                "weight_decay": 0.1,
            },
            "train": {"steps": 50_000, "batch_size": 512, "precision": "bfloat16", "z_loss": 1e-4, "loss_chunk": 2048},
            "eval": {"every": 1000, "rows": 1024},
            "checkpoint": {"every": 1000, "keep": 2, "keep_every": 10_000},
        }
    )
