"""What a checkpoint's `quantization_config` declares, and for which modules."""

from minimax_jax.quantization.config import QuantizationConfig, Scheme
from minimax_jax.quantization.methods import METHODS, read_quantization
from minimax_jax.quantization.modules import ModuleSet

__all__ = ["METHODS", "ModuleSet", "QuantizationConfig", "Scheme", "read_quantization"]
