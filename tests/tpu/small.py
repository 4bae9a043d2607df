"""A run of seconds, for the tests: on 4 hosts with one device each."""

from ml_collections import ConfigDict


def get_config():
    return ConfigDict(
        {
            "model": {
                "vocab_size": 264,
                "num_layers": 1,
                "d_model": 32,
                "num_heads": 4,
                "max_length": 64,
                "dropout": 0.1,
            },
            "data": {"seq_len": 32, "weights": {"prose": 0.4, "lists": 0.6}},
            "optim": {"learning_rate": 0.01, "warmup_steps": 4},
            "train": {"steps": 120, "batch_size": 8, "precision": "float32"},
            "eval": {"every": 60, "rows": 8},
            "checkpoint": {"every": 10},
            "monitor": {"log_every": 1, "tensorboard": False, "peak_flops": 1e12},
        }
    )
