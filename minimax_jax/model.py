"""MiniMax-M2 or M3 from tokens to logits, on one device's shards; no I/O and no sampling.

    embed_tokens -> num_hidden_layers x (attention, experts or a dense MLP) -> norm -> lm_head

Collectives of a step: one all-reduce for the embedding; in each layer one for the output of attention and one for that
of the experts or the MLP, in M2 another for the qk-norm sums; one all-gather of float32 logits. All run inside the
`shard_map` that `generation.programs` sets up.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from minimax_jax.cache import Cache
from minimax_jax.config import ModelConfig, Parallelism
from minimax_jax.modules.decoder import DecoderLayer
from minimax_jax.modules.linear import Embedding, LMHead
from minimax_jax.modules.norms import layer_norm
from minimax_jax.modules.parameter import Parameter
from minimax_jax.modules.step import make_step
from minimax_jax.parameters import ParameterSpec
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quant import Weight

Weights = dict[str, Weight]  # parameter path -> value, such as "layers.0.self_attn.q_proj.weight"


class CausalLM(nnx.Module):
    """The causal language model; `kv_scales` says whether the checkpoint has scales for an FP8 key/value cache."""

    def __init__(
        self,
        config: ModelConfig,
        parallelism: Parallelism,
        dtype: jnp.dtype,
        kv_scales: bool = False,
        implementation: Implementation = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(
            [DecoderLayer(config, i, parallelism, kv_scales, implementation) for i in range(config.num_hidden_layers)]
        )
        self.norm = layer_norm(config)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, implementation)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """One step over new tokens.

        Args:
          tokens: [B, T] int32.
          positions: [B, T] int32, each token's index in its own sequence; -1 marks a pad anywhere in a row.
          cache: holds the tokens before these.

        Returns:
          hidden [B, T, D] before the final norm, and the cache with the new tokens.
        """
        step = make_step(self.config, positions, cache)
        x = self.embed_tokens(tokens, self.dtype)
        layers = []
        for layer, lanes in zip(self.layers, cache.layers, strict=True):
            x, lanes = layer(x, lanes, step)
            layers.append(lanes)
        return x, Cache(tuple(layers), cache.page_table)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> [..., V] float32."""
        return self.lm_head(self.norm(hidden))


def abstract_parameters(
    config: ModelConfig, parallelism: Parallelism, *, kv_scales: bool = False
) -> dict[str, ParameterSpec]:
    """Every parameter of the model by path, as it must be loaded."""
    model = CausalLM(config, parallelism, jnp.dtype(jnp.float32), kv_scales)
    return {path: variable.get_metadata()["spec"] for path, variable in _variables(model).items()}


def build(
    config: ModelConfig,
    parallelism: Parallelism,
    dtype: jnp.dtype,
    weights: Mapping[str, Weight],
    implementation: Implementation = None,
) -> CausalLM:
    """The model with its weights in place; under `shard_map` they are a device's parts."""
    model = CausalLM(config, parallelism, dtype, has_kv_scales(weights), implementation)
    variables = _variables(model)
    if variables.keys() != weights.keys():
        raise ValueError(f"parameters without a value, or values without one: {variables.keys() ^ weights.keys()}")
    for path, variable in variables.items():
        variable.set_value(weights[path])
    return model


def has_kv_scales(weights: Mapping[str, Weight]) -> bool:
    """Whether scales for an FP8 key/value cache are among the weights."""
    return "layers.0.self_attn.k_scale" in weights


def _variables(model: nnx.Module) -> dict[str, Parameter]:
    """Parameters by path."""
    nodes = nnx.iter_graph(model)
    return {".".join(map(str, path)): node for path, node in nodes if isinstance(node, Parameter)}
