"""Muon and the true matrices against optax's equations of one matrix."""

import jax
import numpy as np
import optax

from lmjax.model import decoder
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.optim import matrices, muon
from lmjax.optim.shapes import MATRICES

MOE = MoeConfig(num_experts=4, shared_d_ff=24)
MODEL = ModelConfig(vocab_size=8, num_layers=3, d_model=32, num_heads=6, num_kv_heads=2, head_dim=8, d_ff=40, moe=MOE)


def weights():
    """Random weights of all the layers' products, by name."""
    layers = decoder.init(MODEL, jax.random.key(0))["layers"]
    products = {**layers["attention"], **layers["moe"], **layers["moe"]["shared"]}
    return {name: products[name] for name in MATRICES}


def by_hand(name, weight):
    """The true matrices, one by one, from what the model does with its weights."""
    w, (_, d, k, slots, h) = np.asarray(weight), weights()["qkv"].shape
    found = {
        "qkv": lambda: [
            [layer[:, :, :-2].reshape(d, k * (slots - 2) * h) for layer in w],
            [layer[:, :, slot].reshape(d, k * h) for layer in w for slot in (-2, -1)],
        ],
        "out": lambda: [[layer.reshape(-1, d) for layer in w]],
        "up": lambda: [[layer[:, half] for layer in w for half in (0, 1)]],
        "down": lambda: [list(w)],
        "expert_up": lambda: [[expert[:, half] for layer in w for expert in layer for half in (0, 1)]],
        "expert_down": lambda: [[expert for layer in w for expert in layer]],
    }
    return found[name]()


def test_the_true_matrices_and_back():
    for name, weight in weights().items():
        stacks, expected = matrices.split(name, weight), by_hand(name, weight)
        for stack, matrix in zip(stacks, expected, strict=True):
            np.testing.assert_array_equal(stack, np.stack(matrix))
        np.testing.assert_array_equal(matrices.join(name, stacks, weight), weight)


def test_a_step_is_optax_on_each_true_matrix():
    grads = weights()
    ours = muon.scale_by_muon(0.95, 1e-8)
    state = ours.init(grads)
    for power in (1, 3):
        updates, state = jax.jit(ours.update)({name: g**power for name, g in grads.items()}, state)
    for name, weight in grads.items():
        stacks = [matrices.split(name, weight**power) for power in (1, 3)]
        trees = [{str(i): m for i, m in enumerate(m for stack in one for m in stack)} for one in stacks]
        theirs = optax.contrib.muon(-1.0, muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(0, 1))
        their_state = theirs.init(trees[0])
        for tree in trees:
            expected, their_state = jax.jit(theirs.update)(tree, their_state, tree)
        found = [m for stack in matrices.split(name, updates[name]) for m in stack]
        for i, matrix in enumerate(found):
            np.testing.assert_allclose(matrix, expected[str(i)], atol=2e-5, err_msg=name)
