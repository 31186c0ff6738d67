"""M2's attention: grouped-query, causal, norm over all heads, partial RoPE, no bias."""

from __future__ import annotations

import jax
from flax import nnx

from minimax_jax.cache import LayerCache
from minimax_jax.config import MiniMaxM2Config, Parallelism
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
    """q, k, v -> norm -> RoPE -> cache -> attention -> o_proj, heads spread over the model axis.

    Two all-reduces: the norm's sums, and the output. With fewer key/value heads than devices each head lies on several
    of them, side by side with the query heads that read it.
    """

    def __init__(
        self,
        config: MiniMaxM2Config,
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
        self.q_norm = HeadsNorm(q_rows, "heads", config.rms_norm_eps)
        self.k_norm = HeadsNorm(kv_rows, "kv_heads", config.rms_norm_eps)
        self.head_dim = h
        # The kernels of attention are still to come: their name asks for the best there is.
        self.implementation = None if implementation == "pallas" else implementation
        if kv_scales:  # of the checkpoint, for an FP8 cache; a wider one needs none
            self.k_scale = declare(ParameterSpec((), (), "float32"))
            self.v_scale = declare(ParameterSpec((), (), "float32"))

    def __call__(self, x: jax.Array, cache: LayerCache, step: Step) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> ([B, T, D], the cache with the new tokens)."""
        B, T, _ = x.shape
        q, k, v = (proj(x).astype(x.dtype) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = norm_q_and_k(q, k, self.q_norm, self.k_norm)
        q, k, v = (a.reshape(B, T, -1, self.head_dim) for a in (q, k, v))
        q, k = apply_rope(q, step.rope), apply_rope(k, step.rope)
        cache = cache.write(k, v, step.places)
        out = paged_attention(
            q,
            cache.k,
            cache.v,
            step.page_table,
            step.positions,
            scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )
        out = out.reshape(B, T, -1).astype(x.dtype)
        return model_psum(self.o_proj(out)).astype(x.dtype), cache
