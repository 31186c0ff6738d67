"""Arranging experts after loading: only where the tensor-core kernel will read them, each device its own part."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax import LLM, kernel_order
from minimax_jax.config import Parallelism
from minimax_jax.kernel_order import arrange_experts, describe
from minimax_jax.parameters import ParameterSpec
from minimax_jax.sharding import make_mesh, named_sharding
from minimax_jax.tiny import make_tiny
from pallas_kernels.quant import Format, QuantTensor, dequantize

E, F, D = 4, 512, 128
SPECS = {
    "layers.0.block_sparse_moe.experts.w13": ParameterSpec((E, 2, F, D), ("experts", None, "expert_width", "hidden")),
    "layers.0.block_sparse_moe.experts.w2": ParameterSpec((E, D, F), ("experts", "hidden", "expert_width")),
    "norm.weight": ParameterSpec((D,), ("hidden",), "vector"),
}
W13, W2, _ = SPECS


def weights(mesh: Any, parallelism: Parallelism, byte: int = 120) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {"norm.weight": jnp.ones((D,))}
    for path in (W13, W2):
        *lead, rows, cols = SPECS[path].shape
        payload = rng.integers(0, 2**32, (*lead, rows, cols // 8), dtype=np.uint32)
        scale = np.full((*lead, rows, cols // 32), byte, np.uint8)
        sharding = named_sharding(mesh, SPECS[path].axes, parallelism)
        place = lambda array, to=sharding: jax.device_put(array, to)  # noqa: E731
        made[path] = QuantTensor(place(payload), place(scale), Format("mxfp4", (1, 32)))
    return made


def order(tree: dict[str, Any]) -> set[str]:
    return {tree[path].format.order for path in (W13, W2)}


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_order, "_has_tensor_core_kernel", lambda mesh: True)


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("experts", ["tensor", "expert"])
@pytest.mark.parametrize("model", [1, 4])
def test_each_device_arranges_its_own_part(model: int, experts: Any) -> None:
    parallelism = Parallelism(model=model, experts=experts)
    mesh = make_mesh(parallelism)
    given = weights(mesh, parallelism)
    want = {path: np.asarray(dequantize(given[path], jnp.dtype(jnp.float32))) for path in (W13, W2)}
    arranged = arrange_experts(given, SPECS, mesh, parallelism, jnp.dtype(jnp.bfloat16))
    assert order(arranged) == {"tiles"}
    assert arranged["norm.weight"] is given["norm.weight"]
    for path in (W13, W2):
        part = named_sharding(mesh, SPECS[path].axes, parallelism).devices_indices_map(SPECS[path].shape)
        for payload, scale in zip(
            arranged[path].payload.addressable_shards, arranged[path].scale.addressable_shards, strict=True
        ):
            assert payload.device == scale.device
            own = QuantTensor(payload.data, scale.data, arranged[path].format)
            np.testing.assert_array_equal(
                dequantize(own, jnp.dtype(jnp.float32)), want[path][part[payload.device]], err_msg=path
            )


@pytest.mark.usefixtures("nvidia")
def test_where_the_kernel_will_not_read_them_nothing_changes() -> None:
    one = Parallelism()
    mesh = make_mesh(one)

    def after(byte: int = 120, parallelism: Parallelism = one, **options: Any) -> set[str]:
        mesh = make_mesh(parallelism)
        dtype = options.pop("dtype", jnp.dtype(jnp.bfloat16))
        return order(arrange_experts(weights(mesh, parallelism, byte), SPECS, mesh, parallelism, dtype, **options))

    assert after() == {"tiles"}
    assert after(dtype=jnp.dtype(jnp.float32)) == {"rows"}
    assert after(implementation="xla") == {"rows"}
    assert after(byte=200) == {"rows"}  # a scale that the kernel does not compute exactly
    assert after(parallelism=Parallelism(model=8)) == {"rows"}  # 64 columns a device: half a pair of tiles
    assert order(weights(mesh, one)) == {"rows"}


def test_only_nvidia_gpus_from_hopper_on_have_the_kernel() -> None:
    def mesh(kind: str, capability: str) -> Any:
        device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
        return types.SimpleNamespace(devices=np.array([[device]]))

    assert kernel_order._has_tensor_core_kernel(mesh("NVIDIA H200", "9.0"))
    assert not kernel_order._has_tensor_core_kernel(mesh("NVIDIA A100-SXM4-80GB", "8.0"))
    assert not kernel_order._has_tensor_core_kernel(mesh("gfx942", "gfx942"))
    assert not kernel_order._has_tensor_core_kernel(make_mesh(Parallelism()))


def test_the_log_says_how_packed_weights_are_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_tiny(tmp_path / "tiny", weight_format="mxfp4")
    with caplog.at_level("INFO", "minimax_jax"):
        LLM(directory, max_model_len=128, max_num_seqs=1)
    assert "mxfp4 weights decoded by XLA" in caplog.text


def test_a_gpu_without_fp4_units_decodes_in_the_kernel() -> None:
    """The plan for gfx942: never a native FP4 product there."""
    device = types.SimpleNamespace(device_kind="gfx942", platform="gpu", compute_capability="gfx942")
    mesh: Any = types.SimpleNamespace(devices=np.array([[device]]))
    tree = weights(make_mesh(Parallelism()), Parallelism())
    assert describe(tree, mesh, None) == (
        "mxfp4 weights decoded inside Pallas kernels, products in the compute dtype, on gfx942"
    )
