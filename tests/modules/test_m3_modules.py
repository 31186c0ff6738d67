"""M3's norm, router and activation against numbers a person can check, in every format of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from minimax_jax.cache import Cache, LayerCache
from minimax_jax.checkpoint.quantizers import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from minimax_jax.config import MiniMaxM3Config, Parallelism, YarnScaling
from minimax_jax.model import Weights
from minimax_jax.modules.decoder import DecoderLayer
from minimax_jax.modules.moe import route
from minimax_jax.modules.norms import GemmaRMSNorm
from minimax_jax.modules.step import make_step
from minimax_jax.sharding import make_mesh, model_psum, shard_map
from pallas_kernels.quant import Format, QuantTensor, Weight

# (gate, up) and what comes out; plain SiLU gives 71.98 and 0.7311 for the first two.
VALUES = [(8.0, 9.0, 55.9996), (1.0, 1.0, 1.69159), (-8.0, 9.0, -0.0000781)]
FORMATS = ["bfloat16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
D, F = 64, 32
CONFIG = MiniMaxM3Config(
    vocab_size=64,
    hidden_size=D,
    intermediate_size=F,
    dense_intermediate_size=F,
    shared_intermediate_size=F,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    rotary_dim=8,
    rope_theta=1e4,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    num_local_experts=2,
    num_experts_per_tok=1,
    mlp_layer_types=("dense", "sparse"),
    layer_types=("full_attention", "minimax_m3_sparse"),
    index_n_heads=1,
    index_head_dim=16,
    index_topk_blocks=2,
    index_block_size=16,
    routed_scaling_factor=1.0,
    swiglu_alpha=1.702,
    swiglu_beta=1.0,
    swiglu_limit=7.0,
)


def norm(weight: np.ndarray) -> GemmaRMSNorm:
    module = GemmaRMSNorm(weight.size, 1e-12)
    module.weight.set_value(jnp.asarray(weight))
    return module


def test_a_weight_of_zero_is_no_change_of_scale() -> None:
    x = jnp.array([[3.0, 4.0]])
    np.testing.assert_allclose(np.asarray(norm(np.zeros(2, np.float32))(x)), [[0.848528, 1.131371]], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(norm(np.ones(2, np.float32))(x)), [[1.697056, 2.262742]], rtol=1e-5)


def test_each_head_is_normed_by_itself() -> None:
    """Two heads of four; a norm over both would give 0.6527, 0.8703 and 2.6109."""
    heads = jnp.array([[[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 12.0]]])
    got = np.asarray(norm(np.zeros(4, np.float32))(heads))
    np.testing.assert_allclose(got, [[[1.2, 1.6, 0, 0], [0, 0, 0, 2.0]]], rtol=1e-5)


def test_bfloat16_is_rounded_once_after_the_weight() -> None:
    x = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    weight = np.array([0.7, -0.7, 0.1], np.float32)
    exact = np.array([1.0, 2.0, 3.0]) / np.sqrt(14 / 3) * (1 + weight)
    np.testing.assert_array_equal(np.asarray(norm(weight)(x))[0], exact.astype(ml_dtypes.bfloat16))


def test_yarn_stretches_the_slow_pairs() -> None:
    """M3's million tokens: 16 pairs turn more than 32 times over 524288 tokens, those from the 24th less than once."""
    yarn = YarnScaling(factor=2.0, original_max_position_embeddings=524288, attention_factor=1.0693147)
    sizes = {"head_dim": 128, "rotary_dim": 64, "index_head_dim": 128, "rope_theta": 5e6}
    plain = dataclasses.replace(CONFIG, **sizes, max_position_embeddings=1048576)
    cache = Cache((LayerCache(*[jnp.zeros((1, 16, 1, 128))] * 2),), jnp.zeros((1, 1), jnp.int32))
    positions = jnp.array([[3]], jnp.int32)
    angles = 3 * 5e6 ** (-np.arange(32) / 32)
    unchanged = make_step(plain, positions, cache).rope
    stretched = make_step(dataclasses.replace(plain, yarn=yarn), positions, cache).rope
    factors = np.concatenate([np.ones(17), 1 - np.arange(1, 8) / 16, np.full(8, 0.5)])
    for table, other, function in zip(unchanged, stretched, (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(np.asarray(table)[0, 0], function(angles), rtol=1e-5)
        np.testing.assert_allclose(np.asarray(other)[0, 0], 1.0693147 * function(angles * factors), rtol=1e-5)


def test_routed_weights_are_scaled() -> None:
    ids, weights = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), jnp.array([0.0, 0.0, 0.0, 10.0]), 2, 2.0)
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(np.asarray(weights), [[0.467831, 1.532169]], atol=2e-6)


def pack(matrix: np.ndarray, name: str) -> Weight:
    """[rows, cols] whose values each format holds exactly."""
    if name == "bfloat16":
        return jnp.asarray(matrix, jnp.bfloat16)
    if name == "fp8":
        return QuantTensor(
            jnp.asarray(2 * matrix, jnp.float8_e4m3fn), jnp.full((1, 1), 0.5), Format("fp8", matrix.shape)
        )
    if name == "mxfp8":
        payload, scale = quantize_mxfp8(matrix)
        return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), Format("mxfp8", (1, 32)))
    if name == "mxfp4":
        codes, scale = quantize_mxfp4(matrix)
        return QuantTensor(jnp.asarray(codes.view(np.uint32)), jnp.asarray(scale), Format("mxfp4", (1, 32)))
    codes, scale, whole = quantize_nvfp4(matrix, np.float32(1 / 6))
    packed = jnp.asarray(codes.view(np.uint32)), jnp.asarray(scale)
    return QuantTensor(*packed, Format("nvfp4", (1, 16)), global_scale=jnp.asarray(whole))


def weights_of(name: str, part: str) -> Weights:
    """Of a dense layer and a sparse one, whose second expert is always chosen; all zero but in one part.

    There gate and up of channel 0 are x's first two, and come out as channel 0.
    """
    first, second, third = (np.zeros((F, D), np.float32) for _ in range(3))
    first[0, 0] = second[0, 1] = third[0, 0] = 1.0
    zero = pack(np.zeros((F, D), np.float32), name), pack(np.zeros((D, F), np.float32), name)
    one = pack(first, name), pack(second, name), pack(np.ascontiguousarray(third.T), name)
    weights: Weights = {
        "layers.1.block_sparse_moe.gate.weight": jnp.zeros((2, D)),
        "layers.1.block_sparse_moe.e_score_correction_bias": jnp.array([0.0, 1.0]),
    }
    for path in ("layers.0.mlp", "layers.1.block_sparse_moe.shared_experts"):
        chosen = one if path.endswith(f".{part}") else (zero[0], *zero)
        weights |= {f"{path}.{m}_proj.weight": w for m, w in zip(("gate", "up", "down"), chosen, strict=True)}
    w1, w3, w2 = one if part == "experts" else (zero[0], *zero)
    experts = "layers.1.block_sparse_moe.experts"
    weights[f"{experts}.w13"] = stack([stack([zero[0], zero[0]]), stack([w1, w3])])
    weights[f"{experts}.w2"] = stack([zero[1], w2])
    return weights


@pytest.mark.parametrize("implementation", ["xla", "pallas", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_activation_reaches_every_path(name: str, implementation: str) -> None:
    """The dense layer's MLP, the shared expert and a routed one, each through the model's own layers; float32."""
    x = np.zeros((1, len(VALUES), D), np.float32)
    x[0, :, :2] = [value[:2] for value in VALUES]
    real = jnp.ones((1, len(VALUES)), bool)
    parallelism = Parallelism()

    def layers(weights: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dense, sparse = (DecoderLayer(CONFIG, i, parallelism, implementation=implementation) for i in (0, 1))
        for i, layer in enumerate((dense, sparse)):
            for path, node in nnx.iter_graph(layer):
                if (found := ".".join(map(str, ("layers", i, *path)))) in weights:
                    node.set_value(weights[found])
        return model_psum(dense.mlp(x)), sparse.block_sparse_moe(x, real)

    run = jax.jit(shard_map(layers, make_mesh(parallelism), (PartitionSpec(),) * 2, (PartitionSpec(),) * 2))
    for part, layer in (("mlp", 0), ("shared_experts", 1), ("experts", 1)):
        out = run(weights_of(name, part), jnp.asarray(x))
        got = np.asarray(out[layer])[0]
        np.testing.assert_allclose(got[:2, 0], [value[2] for value in VALUES[:2]], rtol=1e-5, err_msg=part)
        np.testing.assert_allclose(got[2, 0], VALUES[2][2], rtol=1e-3, err_msg=part)
        assert not got[:, 1:].any()
        assert not np.asarray(out[1 - layer]).any()


def stack(parts: list[Any]) -> Any:
    """A new first axis."""
    if not isinstance(parts[0], QuantTensor):
        return jnp.stack(parts)
    whole = None if parts[0].global_scale is None else jnp.stack([part.global_scale for part in parts])
    payload, scale = jnp.stack([part.payload for part in parts]), jnp.stack([part.scale for part in parts])
    return QuantTensor(payload, scale, parts[0].format, global_scale=whole)
