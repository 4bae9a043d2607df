"""Bytes as tokens: 262 ids, nothing to train.

Command   lmjax tokenizer --config configs/tokenizer/byte.py --documents DIR --out DIR
Hardware  any
Time      below 1 s
Reached   1 byte a token, by definition
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """No field but the kind."""
    return ConfigDict({"kind": "byte"})
