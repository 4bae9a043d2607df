"""A ladder of five models, 13 to 124 thousand parameters, on 128, 256 and 512 thousand bytes each, and a sixth, twice as large.

Command   bash scripts/scaling_ladder.sh
Hardware  2 CPU cores that much else ran on, float32
Time      18 min with the shards, in one process, 5.3 min of a core's time;
          the script starts a process for each run
Reached   L = 1.16 + 27.8 / N^0.44 + 209 / D^0.47. The sixth, 246,880 parameters on 512,000 bytes: 1.706 nats a byte predicted
          (1.636 to 1.776 with 90 %), 1.674 reached

Each point is a run of its own, whose rate falls to zero at its last byte: a point of a longer run, before its rate has fallen, is
no run of that length (what set Hoffmann et al. apart from Kaplan et al.). The coefficients alone are loosely known (E: 0 to 1.5).

What did not hold: with 1,024 pieces in place of bytes, 66 to 431 thousand parameters on 154 to 614 thousand tokens, a sixth that was
twice as large and twice as long reached 3.108 where 3.247 (3.184 to 3.370) was predicted. In so few steps larger models are not yet
ahead, so their lead grows with D, which no sum of a term in N and a term in D describes; the interval knows the runs' scatter only.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The smallest rung; the script sets width, layers and steps of the others, whose hyper-parameters `mup` carries over."""
    return ConfigDict(
        {
            "model": {
                "vocab_size": 262,
                "num_layers": 2,
                "d_model": 16,
                "head_dim": 16,
                "num_heads": 1,
                "qk_norm": True,
                "max_length": 64,
                "mup": {"base_width": 16, "base_layers": 2},
            },
            "data": {"seq_len": 64},
            "optim": {
                "name": "muon",
                "learning_rate": 0.03,
                "adam_learning_rate": 0.015,
                "schedule": "linear",
                "warmup_steps": 10,
                "final_ratio": 0.0,
                "weight_decay": 0.01,
            },
            "train": {"steps": 250, "batch_size": 8, "precision": "float32", "loss_chunk": 2048},
            "eval": {"every": None, "rows": 512},
            "checkpoint": {"every": 10_000, "keep": 1},
            "monitor": {"log_every": 125, "tensorboard": False},
        }
    )
