"""Grouped-query causal attention with partial RoPE: what both families share, and M2's norm over all heads."""

from __future__ import annotations

import jax
from flax import nnx

from minimax_jax.cache import LayerCache
from minimax_jax.config import ModelConfig, Parallelism
from minimax_jax.modules.linear import Linear
from minimax_jax.modules.norms import HeadsNorm, norm_q_and_k
from minimax_jax.modules.parameter import declare
from minimax_jax.modules.rope import apply_rope
from minimax_jax.modules.step import Step
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import model_psum
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention


class Attention(nnx.Module):
    """q, k, v -> norm -> RoPE -> cache -> attention -> o_proj, heads spread over the model axis; no bias.

    With fewer key/value heads than devices each head lies on several of them, side by side with the query heads that
    read it. One all-reduce, of the output.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallelism: Parallelism,
        kv_scales: bool = False,
        implementation: Implementation = None,
    ) -> None:
        D, h = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_attention_heads * h, config.num_kv_heads_on(parallelism) * h
        self.q_proj = Linear(ParameterSpec((q_rows, D), ("heads", "hidden")), implementation)
        self.k_proj = Linear(ParameterSpec((kv_rows, D), ("kv_heads", "hidden")), implementation)
        self.v_proj = Linear(ParameterSpec((kv_rows, D), ("kv_heads", "hidden")), implementation)
        self.o_proj = Linear(ParameterSpec((D, q_rows), ("hidden", "heads")), implementation)
        self.head_dim = h
        self.implementation = implementation
        if kv_scales:  # of the checkpoint, for an FP8 cache; a wider one needs none
            self.k_scale = declare(ParameterSpec((), (), "float32"))
            self.v_scale = declare(ParameterSpec((), (), "float32"))

    def __call__(self, x: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> ([B, T, D], the cache with the new tokens)."""
        B, T, _ = x.shape
        q, k, v = (proj(x).astype(x.dtype) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.norm(q, k)
        q, k, v = (a.reshape(B, T, -1, self.head_dim) for a in (q, k, v))
        q, k = apply_rope(q, step.rope), apply_rope(k, step.rope)
        cache = cache.write(k, v, step.places)
        out, cache = self.attend(x, q, cache, step)
        out = out.reshape(B, T, -1).astype(x.dtype)
        return model_psum(self.o_proj(out)).astype(x.dtype), cache

    def norm(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q [B, T, local H * h] and k [B, T, local K * h], normed."""
        raise NotImplementedError

    def attend(self, x: jax.Array, q: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        """q [B, T, local H, h] over all keys up to its own -> [B, T, local H, h] float32, and the cache."""
        out = paged_attention(
            q,
            cache.k,
            cache.v,
            step.page_table,
            step.positions,
            scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )
        return out, cache


class MiniMaxM2Attention(Attention):
    """M2's: q and k normed over all heads of all devices, which costs a second all-reduce.

    Source: transformers `MiniMaxM2Attention`.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallelism: Parallelism,
        kv_scales: bool = False,
        implementation: Implementation = None,
    ) -> None:
        super().__init__(config, parallelism, kv_scales, implementation)
        h, eps = config.head_dim, config.rms_norm_eps
        self.q_norm = HeadsNorm(config.num_attention_heads * h, "heads", eps)
        self.k_norm = HeadsNorm(config.num_kv_heads_on(parallelism) * h, "kv_heads", eps)

    def norm(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return norm_q_and_k(q, k, self.q_norm, self.k_norm)
