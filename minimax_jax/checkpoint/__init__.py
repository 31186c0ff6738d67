"""Reading a published checkpoint: index and headers, the plan that proves its coverage, and loading onto a mesh."""

from minimax_jax.checkpoint.lazy import LazyArray, LazyQuant
from minimax_jax.checkpoint.load import load_parameters
from minimax_jax.checkpoint.name_map import has_kv_scales
from minimax_jax.checkpoint.plan import FormatTotal, LoadPlan, plan_parameters
from minimax_jax.checkpoint.safetensors_index import Checkpoint, TensorInfo, open_checkpoint

__all__ = [
    "Checkpoint",
    "FormatTotal",
    "LazyArray",
    "LazyQuant",
    "LoadPlan",
    "TensorInfo",
    "has_kv_scales",
    "load_parameters",
    "open_checkpoint",
    "plan_parameters",
]
