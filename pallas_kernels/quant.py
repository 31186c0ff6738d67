"""Packed weights: the payload as it lies in the checkpoint, beside its scales. Decoding happens where it is used."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """A block-scaled matrix (or a stack of them) that stays packed in memory.

    Attributes:
      payload: [..., rows, cols] float8_e4m3fn, the checkpoint's bytes.
      scale: [..., ceil(rows / block[0]), ceil(cols / block[1])] float32, a multiplier.
      block: (rows, cols) of the payload that share one scale; the last block of an axis may be ragged.
    """

    payload: jax.Array
    scale: jax.Array
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded matrix."""
        return tuple(self.payload.shape)


Weight = jax.Array | QuantTensor


def expand_scale(scale: jax.Array, block: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """One scale per element: [..., rows/block, cols/block] -> [..., rows, cols] float32."""
    rows, cols = shape[-2:]
    scale = jnp.repeat(scale, block[0], axis=-2)[..., :rows, :]
    return jnp.repeat(scale, block[1], axis=-1)[..., :cols]


def dequantize(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The decoded weight in `dtype`: payload x scale in float32, rounded once."""
    if not isinstance(weight, QuantTensor):
        return weight.astype(dtype)
    scale = expand_scale(weight.scale, weight.block, weight.shape)
    return (weight.payload.astype(jnp.float32) * scale).astype(dtype)
