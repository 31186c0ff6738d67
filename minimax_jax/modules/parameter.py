"""How a module declares a parameter: by shape and logical axes, never by a default value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minimax_jax.parameters import ParameterSpec
from pallas_kernels.quant import Weight


class Parameter(nnx.Param[Weight]):
    """A weight whose `spec` metadata says what must be loaded into it."""


def declare(spec: ParameterSpec) -> Parameter:
    """A parameter without a value; the loader fills it."""
    shape: Any = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
    return Parameter(shape, spec=spec)


def array(parameter: Parameter) -> jax.Array:
    """The value of a parameter that is never packed."""
    value = parameter.get_value()
    assert isinstance(value, jax.Array), "a vector or float32 parameter is never packed"
    return value
