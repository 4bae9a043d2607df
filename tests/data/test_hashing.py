"""Hashes modulo 2^64 against Python's integers."""

import numpy as np
import pytest

from lmjax.data.hashing import GOLDEN, mix, powers


def test_mix_is_the_finalizer_of_splitmix():
    """Its first numbers from the seed 0, as the authors' code prints them."""
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(GOLDEN)
    assert [hex(value) for value in mix(states).tolist()] == [
        "0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 1024, 1025])
def test_powers_and_their_inverses(count):
    power, inverse = powers(count)
    assert len(power) == len(inverse) == count
    for k in {0, count // 2, count - 1}:
        assert int(power[k]) == pow(GOLDEN, k, 1 << 64) and int(power[k]) * int(inverse[k]) % (1 << 64) == 1
