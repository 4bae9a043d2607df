"""64-bit hashes of integers in NumPy, all modulo 2^64."""

import functools

import numpy as np
from jaxtyping import UInt64

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: spreads as a factor, and has an inverse as a base


def mix(values: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): one to one, and every bit of the input reaches all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def powers(count: int) -> tuple[UInt64[np.ndarray, " N"], UInt64[np.ndarray, " N"]]:
    """GOLDEN^0, GOLDEN^1 …, `count` of them, and their inverses: of a polynomial hash the powers, and what shifts it."""
    table = kept_powers(1 << max(10, (count - 1).bit_length()))
    return table[0][:count], table[1][:count]


@functools.lru_cache(maxsize=64)
def kept_powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """See `powers`; kept, and made anew only when more are asked for."""
    rows = []
    for base in (GOLDEN, pow(GOLDEN, -1, 1 << 64)):
        row = np.full(count, base, np.uint64)
        row[0] = 1
        rows.append(np.multiply.accumulate(row))
    return rows[0], rows[1]
