"""The arguments that cuDNN gets, given to JAX's plain form of the same function: it runs on no CPU. What it cannot do it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import RULES, agree, inputs

from lmjax.errors import UserError
from lmjax.model import attention, cudnn
from lmjax.model.attention import Mask, by_cudnn
from lmjax.model.blockwise import Rule
from lmjax.model.config import ModelConfig

NO_CAP = {name: rule for name, rule in RULES.items() if rule.softcap is None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", NO_CAP.values(), ids=NO_CAP)
def test_its_arguments_mean_the_same(rule, packed):
    def ours(q, k, v, ids):
        return cudnn.attend(q, k, v, ids if packed else None, rule, kernel="xla")

    agree(ours, 40, rule, ids=None if packed else np.ones((2, 40), np.int32))


@pytest.mark.parametrize(
    "dtype, dim, length, softcap, message",
    [
        (jnp.bfloat16, 64, 32, 5.0, "a soft-cap"),
        (jnp.float32, 64, 32, None, "float32"),
        (jnp.bfloat16, 20, 32, None, "heads of 20"),
        (jnp.bfloat16, 64, 33, None, "an odd number of tokens"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(dtype, dim, length, softcap, message):
    arrays = (x.astype(dtype) for x in inputs(length, dim=dim))
    with pytest.raises(UserError, match=f"'cudnn' cannot do .*{message}"):
        by_cudnn(*arrays, Mask(), softcap)


def test_kernels_of_another_platform_are_refused():
    for name, home in (("cudnn", "gpu"), ("splash", "tpu")):
        attention.check_platform(ModelConfig(attention=name), home)
        with pytest.raises(UserError, match=f"{name}' runs on a {home}, not on this cpu"):
            attention.check_platform(ModelConfig(attention=name), "cpu")


@pytest.mark.parametrize(
    "platform, length, dtype, rule, name",
    [
        ("cpu", 128, "bfloat16", Rule(), "reference"),
        ("cpu", 4096, "bfloat16", Rule(), "blockwise"),
        ("gpu", 4096, "bfloat16", Rule(window=7), "cudnn"),
        ("gpu", 4096, "float32", Rule(), "blockwise"),
        ("gpu", 4096, "bfloat16", Rule(softcap=50.0), "blockwise"),
        ("gpu", 65536, "bfloat16", Rule(), "blockwise"),
        ("tpu", 4096, "float32", Rule(50.0, 7), "splash"),
        ("tpu", 4100, "bfloat16", Rule(), "blockwise"),
        ("tpu", 4096, "bfloat16", Rule(prefix=4), "blockwise"),
    ],
)
def test_auto_chooses_by_platform_and_shape_and_mask(platform, length, dtype, rule, name):
    config = ModelConfig(d_model=384)
    assert attention.chosen(config, length, jnp.dtype(dtype), rule, platform) == name
    assert attention.chosen(ModelConfig(attention="reference"), length, jnp.dtype(dtype), rule, platform) == "reference"
