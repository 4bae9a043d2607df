"""The quickstart's model: a few million parameters on the built-in corpus, minutes on a laptop.

Command   bash scripts/quickstart.sh
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """A small Llama-like decoder."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 4096,
                "num_layers": 4,
                "d_model": 192,
                "num_heads": 6,
                "qk_norm": True,
                "max_length": 1024,
            },
            "data": {"seq_len": 256},
            "optim": {
                "name": "muon",
                "learning_rate": 0.012,
                "adam_learning_rate": 0.005,
                "schedule": "linear",
                "warmup_steps": 20,
                "final_ratio": 0.0,
                "weight_decay": 0.01,
            },
            "train": {"steps": 600, "batch_size": 8, "precision": "float32", "loss_chunk": 2048},
            "eval": {"every": 150, "rows": 256},
            "checkpoint": {"every": 150, "keep": 2},
            "monitor": {"log_every": 10},
        }
    )
