"""RMS norms: the plain one, M2's norm over all heads of all devices, and M3's with its weight around one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from minimax_jax.config import MiniMaxM3Config, ModelConfig
from minimax_jax.modules.parameter import array, declare
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import model_psum


class RMSNorm(nnx.Module):
    """weight * x / sqrt(mean(x^2) + eps), in float32, rounded before the weight as transformers does.

    Source: transformers `MiniMaxM2RMSNorm`. The weight is the factor itself, not an offset from one.
    """

    def __init__(self, size: int, eps: float) -> None:
        self.weight = declare(ParameterSpec((size,), ("hidden",), "vector"))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> the same."""
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return scale_by(x, mean_square, self.eps, array(self.weight))


class GemmaRMSNorm(nnx.Module):
    """(1 + weight) * x / sqrt(mean(x^2) + eps) over the last axis, in float32, rounded once.

    Source: transformers `MiniMaxM3VLRMSNorm`. Over the hidden size, or over each head by itself with one weight for
    all heads, which needs no collective. The checkpoint's weight is the offset from one and is kept as it is.
    """

    def __init__(self, size: int, eps: float) -> None:
        self.weight = declare(ParameterSpec((size,), (None,), "vector"))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same."""
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (normed * (1 + array(self.weight).astype(jnp.float32))).astype(x.dtype)


def layer_norm(config: ModelConfig) -> RMSNorm | GemmaRMSNorm:
    """The model's norm over the hidden size."""
    kind = GemmaRMSNorm if isinstance(config, MiniMaxM3Config) else RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps)


class HeadsNorm(nnx.Module):
    """The weight of M2's q_norm or k_norm: one norm over all heads of all devices, before they are split and turned.

    Applied in pairs by `norm_q_and_k`. Source: transformers `MiniMaxM2Attention` (q_norm over H*h, k_norm over K*h).
    """

    def __init__(self, size: int, axis: str, eps: float) -> None:
        self.weight = declare(ParameterSpec((size,), (axis,), "vector"))
        self.size = size  # over the whole mesh; a key/value head that lies on several devices counts as often
        self.eps = eps

    def scale(self, x: jax.Array, sum_of_all_squares: jax.Array) -> jax.Array:
        """x [..., local size] with the sum [..., 1] over all devices -> normed x."""
        return scale_by(x, sum_of_all_squares / self.size, self.eps, array(self.weight))


def norm_q_and_k(q: jax.Array, k: jax.Array, q_norm: HeadsNorm, k_norm: HeadsNorm) -> tuple[jax.Array, jax.Array]:
    """q [..., local H*h], k [..., local K*h] -> the same, normed; both sums travel in one all-reduce."""
    sums = model_psum(jnp.stack([sum_of_squares(q), sum_of_squares(k)], axis=-1))
    return q_norm.scale(q, sums[..., 0:1]), k_norm.scale(k, sums[..., 1:2])


def sum_of_squares(x: jax.Array) -> jax.Array:
    """[..., n] -> [...] float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)


def scale_by(x: jax.Array, mean_square: jax.Array, eps: float, weight: jax.Array) -> jax.Array:
    """x / sqrt(mean_square + eps) in float32, rounded to x's dtype, then times the weight in x's dtype."""
    normed = x.astype(jnp.float32) * lax.rsqrt(mean_square + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)
