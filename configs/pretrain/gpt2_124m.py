"""GPT-2 small (Radford et al., 2019), 124M parameters, on 10 billion tokens of your own shards.

Command   lmjax train --config configs/pretrain/gpt2_124m.py --workdir runs/gpt2 \\
              --config.tokenizer=DIR --config.data.shards=DIR
Hardware  made for 8 accelerators of 24 GB or more; `lmjax plan` on this file gives parameters, FLOPs and memory
Reached   not yet trained to the end
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """GPT-2's model, with nanoGPT's batch of half a million tokens."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 50304,  # GPT-2's 50,257, rounded up to divide over devices
                "num_layers": 12,
                "d_model": 768,
                "num_heads": 12,
                "activation": "gelu",
                "norm": "layernorm",
                "norm_epsilon": 1e-5,
                "norm_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
                "position": "learned",
                "max_length": 1024,
                "tie_embeddings": True,
                "init": "scaled",
                "remat": "dots",
            },
            "data": {"seq_len": 1024},
            "optim": {
                "name": "adamw",
                "learning_rate": 6e-4,
                "schedule": "cosine",
                "warmup_steps": 700,
                "final_ratio": 0.1,
                "b2": 0.95,
                "weight_decay": 0.1,
            },
            "train": {"steps": 19_000, "batch_size": 512, "precision": "bfloat16", "loss_chunk": 4096},
            "eval": {"every": 500, "rows": 1024},
            "checkpoint": {"every": 1000, "keep": 2},
        }
    )
