"""Sampling as pure functions: what each value does, and that a row depends on nothing outside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.generation.sampling import Sampling, gumbel, keep_top, log_probabilities, sample

V = 50


def sampling(B: int, **values: object) -> Sampling:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": (0, 0)}
    given = {
        name: np.broadcast_to(np.asarray(values.get(name, default)), (B, *np.shape(default)))
        for name, default in defaults.items()
    }
    return Sampling(
        jnp.asarray(given["temperature"], jnp.float32),
        jnp.asarray(given["top_k"], jnp.int32),
        jnp.asarray(given["top_p"], jnp.float32),
        jnp.asarray(given["seed"], jnp.uint32),
        jnp.full((B, 1), -1, jnp.int32),
        jnp.full((B,), 99, jnp.int32),
        jnp.zeros((B,), bool),
    )


def draws(logits: np.ndarray, count: int, **values: object) -> np.ndarray:
    """Many draws from one row of logits, one per position."""
    rows = jnp.asarray(np.tile(logits.astype(np.float32), (count, 1)))
    return np.asarray(jax.jit(sample)(rows, sampling(count, **values), jnp.arange(count, dtype=jnp.int32)))


def test_temperature_zero_is_the_likeliest_and_of_equals_the_first() -> None:
    logits = np.zeros(V)
    logits[[7, 30]] = 2.0
    assert set(draws(logits, 20, temperature=0.0).tolist()) == {7}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=V) * 2
    count = 20_000
    got = np.bincount(draws(logits, count, temperature=temperature, seed=(seed, 0)), minlength=V) / count
    want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    assert np.abs(got - want).max() < 4 * np.sqrt(0.25 / count)


def test_top_k_keeps_exactly_k() -> None:
    logits = np.linspace(0, 1, V)
    assert set(draws(logits, 500, top_k=3).tolist()) == {V - 1, V - 2, V - 3}
    assert len(set(draws(logits, 2000, top_k=0).tolist())) == V


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert set(draws(logits, 500, top_p=0.5).tolist()) == {0}
    assert set(draws(logits, 500, top_p=0.51).tolist()) == {0, 1}
    assert set(draws(logits, 500, top_p=0.9).tolist()) == {0, 1, 2}
    assert set(draws(logits, 500, top_p=1.0).tolist()) == {0, 1, 2, 3}
    assert set(draws(logits, 100, top_p=1e-9).tolist()) == {0}


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the two likeliest, renormalised to 0.625 and 0.375, the first alone reaches 0.6.
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert set(draws(logits, 300, top_k=2, top_p=0.6).tolist()) == {0}


def test_top_p_one_keeps_the_whole_tail(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(2, 4096)).astype(np.float32) * 5
    _, kept = keep_top(jnp.asarray(logits), jnp.zeros(2, jnp.int32), jnp.array([1.0, 0.5]))
    assert bool(kept[0].all())
    assert not bool(kept[1].all())


def test_same_seed_same_draw_other_seed_or_position_another() -> None:
    logits = np.zeros(V)
    assert draws(logits, 40, seed=(5, 1)).tolist() == draws(logits, 40, seed=(5, 1)).tolist()
    assert draws(logits, 40, seed=(5, 1)).tolist() != draws(logits, 40, seed=(6, 1)).tolist()
    assert draws(logits, 40, seed=(5, 1)).tolist() != draws(logits, 40, seed=(5, 2)).tolist()
    assert len(set(draws(logits, 40).tolist())) > 10


def test_noise_belongs_to_the_token(seed: int) -> None:
    """Unfiltered, a draw is the argmax of logits plus the noise of (seed, position), in the order of token ids."""
    logits = np.random.default_rng(seed).normal(size=V).astype(np.float32)
    count = 200
    noise = gumbel(jnp.tile(jnp.array([[7, 9]], jnp.uint32), (count, 1)), jnp.arange(count), V)
    assert draws(logits, count, seed=(7, 9)).tolist() == np.argmax(logits + np.asarray(noise), axis=1).tolist()


def test_a_row_depends_on_nothing_outside_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, V)).astype(np.float32)
    values = {"temperature": [1.0, 0.0, 0.6, 1.3], "top_k": [0, 0, 5, 9], "top_p": [1, 1, 0.8, 0.5]}
    seeds = [(42, 0), (1, 0), (2, 0), (3, 0)]
    all_at_once = sample(jnp.asarray(logits), sampling(4, seed=seeds, **values), jnp.full((4,), 3, jnp.int32))
    for i in range(4):
        # The same row, alone among greedy rows of other logits, at another index.
        rows = np.zeros((4, V), np.float32)
        rows[3 - i] = logits[i]
        mine = {
            name: [v[i] if j == 3 - i else neutral for j in range(4)]
            for (name, v), neutral in zip(values.items(), (0, 0, 1), strict=True)
        }
        mine_seeds = [seeds[i] if j == 3 - i else (9, 9) for j in range(4)]
        alone = sample(jnp.asarray(rows), sampling(4, seed=mine_seeds, **mine), jnp.full((4,), 3, jnp.int32))
        assert int(alone[3 - i]) == int(all_at_once[i])


def test_log_probabilities_are_the_models_own() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    got = log_probabilities(logits, jnp.array([2], jnp.int32), jnp.array([True]))
    np.testing.assert_allclose(np.asarray(got.chosen), np.log([0.3]), rtol=1e-5)
    assert got.rank.tolist() == [2]
    assert got.top_ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(np.asarray(got.top), np.log([[0.6, 0.3, 0.1]]), rtol=1e-5)


def test_log_probabilities_are_left_out_when_nobody_asks() -> None:
    got = log_probabilities(jnp.ones((1, V)), jnp.array([2], jnp.int32), jnp.array([False]))
    assert float(jnp.abs(got.top).max()) == 0.0
