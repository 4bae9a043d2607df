"""What each filter keeps, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.generate.sample import Sampling, filtered, sample

LOGITS = jnp.log(jnp.asarray([[0.1, 0.4, 0.1, 0.25, 0.15]]))


def kept(**fields):
    logits, ids = filtered(LOGITS, Sampling(**fields))
    return sorted(np.asarray(ids)[np.isfinite(np.asarray(logits))].tolist())


def test_top_k_keeps_exactly_k_and_breaks_ties_by_id():
    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [1, 3, 4]
    assert kept(top_k=4) == [0, 1, 3, 4]  # 0 and 2 tie
    assert kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_token_that_crosses():
    assert kept(top_p=0.01) == [1]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=0.66) == [1, 3, 4]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4]


def test_top_p_is_of_what_temperature_and_top_k_left():
    assert kept(top_k=2, top_p=0.62) == [1, 3]  # 0.4 / 0.65 = 0.615 is crossed by the second
    assert kept(top_k=2, top_p=0.61) == [1]
    assert kept(temperature=0.1, top_p=0.9) == [1]


def test_draws_follow_the_distribution_and_never_leave_the_vocabulary():
    keys = jax.random.split(jax.random.key(0), 20_000)
    logits = jnp.broadcast_to(LOGITS, (len(keys), 5))
    draws = np.bincount(sample(logits, Sampling(), keys), minlength=5) / len(keys)
    np.testing.assert_allclose(draws, [0.1, 0.4, 0.1, 0.25, 0.15], atol=0.015)
    padded = sample(jnp.concatenate([logits, jnp.full((len(keys), 3), 9.0)], 1), Sampling(), keys, num_ids=5)
    assert int(padded.max()) < 5
    assert sample(jnp.asarray([[1.0, 9.0]]), Sampling(temperature=0.0), keys[:1], num_ids=1).tolist() == [0]


def test_a_row_draws_the_same_whatever_stands_beside_it():
    keys = jax.random.split(jax.random.key(1), 4)
    logits = jax.random.normal(jax.random.key(2), (4, 50))
    together = sample(logits, Sampling(top_k=20), keys)
    np.testing.assert_array_equal(together[2:3], sample(logits[2:3], Sampling(top_k=20), keys[2:3]))


@pytest.mark.parametrize("fields", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_settings_are_the_users_mistake(fields):
    with pytest.raises(UserError):
        Sampling(**fields)
