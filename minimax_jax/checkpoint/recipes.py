"""What a quantised checkpoint holds: which weights are packed, as which tensors, and how its config declares that.

MXFP4 and NVFP4 are laid out as Quark 0.13 does from file to file: routed and shared experts are packed, and the config
names every other linear layer. FP8 and MXFP8 are laid out as the model's vendor does: attention and dense layers too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from minimax_jax.checkpoint.quantizers import (
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    nvfp4_global_scale,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)

PackedFormat = Literal["mxfp4", "nvfp4", "mxfp8", "fp8"]
PACKED_FORMATS: tuple[PackedFormat, ...] = ("mxfp4", "nvfp4", "mxfp8", "fp8")

BLOCK_COLUMNS = {"mxfp4": MX_BLOCK, "nvfp4": NVFP4_BLOCK, "mxfp8": MX_BLOCK, "fp8": 1}  # a row is whole blocks

_LAYER = r"(?:model\.language_model\.|language_model\.model\.|model\.)layers\.\d+\."
_EXPERTS = r"block_sparse_moe\.(?:experts\.\d+\.w[123]|shared_experts\.(?:gate|up|down)_proj)"
_OTHERS = r"self_attn\.(?:[qkvo]|index_[qk])_proj|mlp\.(?:gate|up|down)_proj"
_FP4_MODULES = re.compile(_LAYER + _EXPERTS)
_FP8_MODULES = re.compile(f"{_LAYER}(?:{_EXPERTS}|{_OTHERS})")

# Path components that the vendor's lists name in place of every module below them.
_VISION = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")
_VENDOR_FP8 = ("gate", "e_score_correction_bias", "lm_head")
_VENDOR_MXFP8 = ("lm_head", "model.embed_tokens")


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a linear layer's weight, by the rule of Quark: a matrix, no norm and no embedding."""
    module, _, parameter = name.rpartition(".")
    return parameter == "weight" and len(shape) >= 2 and not module.endswith("norm") and "embed" not in module


def is_packed(module: str, weight_format: PackedFormat) -> bool:
    """Whether the weight of `module` is packed unless the user excludes it."""
    pattern = _FP4_MODULES if weight_format in ("mxfp4", "nvfp4") else _FP8_MODULES
    return pattern.fullmatch(module) is not None


def packed_layout(
    name: str, shape: tuple[int, int], weight_format: PackedFormat
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors in place of the weight `name`: their dtype and shape."""
    rows, cols = shape
    match weight_format:
        case "mxfp4":
            return {name: ("U8", (rows, cols // 2)), f"{name}_scale": ("U8", (rows, cols // MX_BLOCK))}
        case "nvfp4":
            scale = {f"{name}_scale": ("F8_E4M3", (rows, cols // NVFP4_BLOCK)), f"{name}_scale_2": ("F32", ())}
            return {name: ("U8", (rows, cols // 2)), **scale}
        case "mxfp8":
            return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("U8", (rows, cols // MX_BLOCK))}
        case "fp8":
            grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
            return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("F32", grid)}


def pack(
    name: str, weight: np.ndarray, weight_format: PackedFormat, largest: float | None = None
) -> dict[str, np.ndarray]:
    """The tensors of `packed_layout` for float32 rows of a matrix, FP8 in whole blocks but for its end.

    Args:
      largest: magnitude in the whole matrix, where `weight` is a part of it; only NVFP4 asks.
    """
    match weight_format:
        case "mxfp4":
            codes, scale = quantize_mxfp4(weight)
            return {name: codes, f"{name}_scale": scale}
        case "nvfp4":
            whole = None if largest is None else nvfp4_global_scale(largest)
            codes, scale, whole = quantize_nvfp4(weight, whole)
            return {name: codes, f"{name}_scale": scale, f"{name}_scale_2": np.asarray(whole)}
        case "mxfp8":
            payload, scale = quantize_mxfp8(weight)
        case "fp8":
            payload, scale = quantize_fp8(weight)
    return {name: payload, f"{name}_scale_inv": scale}


def declare(weight_format: PackedFormat, plain: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config`; `plain` is every linear layer that is not packed."""
    plain = sorted(plain)
    match weight_format:
        case "mxfp4":
            return _quark(_MXFP4 | {"is_dynamic": True}, _MXFP4 | {"is_dynamic": False}, plain)
        case "nvfp4":
            inputs, weight = _NVFP4 | {"is_dynamic": True}, _NVFP4 | {"is_dynamic": False}
            return _quark([inputs, _NVFP4_SCALE], [weight, _NVFP4_SCALE], plain)
        case "mxfp8":
            return {
                "activation_scheme": "dynamic",
                "ignored_layers": _vendor_list(_VENDOR_MXFP8, plain),
                "quant_method": "mxfp8",
                "weight_block_size": [1, MX_BLOCK],
            }
        case "fp8":
            return {
                "activation_scheme": "dynamic",
                "fmt": "float8_e4m3fn",
                "quant_method": "fp8",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": _vendor_list(_VENDOR_FP8, plain),
            }


def _vendor_list(entries: tuple[str, ...], plain: Iterable[str]) -> list[str]:
    """`entries` and what they leave out of `plain`; an entry holds each module that has it as whole path components."""
    listed = list(entries)
    for module in plain:
        if not any(f".{entry}." in f".{module}." for entry in listed):
            listed.append(next((part for part in _VISION if part in module.split(".")), module))
    return listed


def _quark(inputs: Any, weight: Any, exclude: list[str]) -> dict[str, Any]:
    return {
        "global_quant_config": {
            "input_tensors": inputs,
            "output_tensors": None,
            "weight": weight,
            "bias": None,
            "target_device": None,
        },
        "exclude": exclude,
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": "0.13",  # the layout's
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


_QUARK_TENSOR = {
    "block_size": None,
    "round_method": "half_even",
    "zero_point_type": "int32",
    "scale_calculation_mode": None,
    "mx_element_dtype": None,
    "is_scale_quant": False,
    "enable_buffer_reuse": False,
    "max_input_numel": 4194304,
}
_FP4 = _QUARK_TENSOR | {
    "dtype": "fp4",
    "qscheme": "per_group",
    "ch_axis": -1,
    "symmetric": None,
    "observer_cls": "PerBlockMXObserver",
}
_MXFP4 = _FP4 | {
    "group_size": MX_BLOCK,
    "scale_type": "float",
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
}
_NVFP4 = _FP4 | {"group_size": NVFP4_BLOCK, "scale_type": "float32", "scale_format": "float32"}
_NVFP4_SCALE = _QUARK_TENSOR | {
    "dtype": "fp8_e4m3",
    "is_dynamic": False,
    "qscheme": "per_tensor",
    "ch_axis": None,
    "group_size": None,
    "symmetric": True,
    "scale_type": "float32",
    "scale_format": None,
    "observer_cls": "PerTensorMinMaxObserver",
    "is_scale_quant": True,
}
