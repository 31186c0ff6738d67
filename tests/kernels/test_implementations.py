"""Which implementation runs where: a named one is that or an error, None takes the best and says when it cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.activation import SwiGLU
from pallas_kernels.grouped_moe import grouped_moe
from pallas_kernels.linear import linear
from pallas_kernels.quant import Format, QuantTensor
from pallas_kernels.tiles import arrange

E, F, D, N, K = 4, 128, 128, 5, 2


def experts(dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> QuantTensor:
        *lead, rows, cols = shape
        payload = rng.integers(0, 2**32, (*lead, rows, cols // 8), dtype=np.uint32)
        scale = rng.integers(118, 124, (*lead, rows, cols // 32)).astype(np.uint8)
        return QuantTensor(jnp.asarray(payload), jnp.asarray(scale), Format("mxfp4", (1, 32)))

    ids = jnp.asarray(rng.integers(0, E, (N, K)), jnp.int32)
    x = jnp.asarray(rng.normal(size=(N, D)), dtype)
    return x, draw(E, 2, F, D), draw(E, D, F), ids, jnp.ones((N, K), jnp.float32)


def run(*args: Any, implementation: str | None = None) -> jax.Array:
    return grouped_moe(*args, activation=SwiGLU(), implementation=implementation)


@contextlib.contextmanager
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a JAX that has dropped the route: importing it raises."""
    again = [
        name
        for name in sys.modules
        if name.startswith("pallas_kernels.")
        and name.rpartition(".")[2] in ("kernel", "pallas", "mma", "product", "_triton")
    ]
    # `from package import module` would find what was imported before in the package.
    for name in [*again, "jax.experimental.pallas.triton"]:
        package, _, module = name.rpartition(".")
        if package in sys.modules:
            monkeypatch.delattr(sys.modules[package], module, raising=False)
    for name in again:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    dispatch.note_once.cache_clear()
    yield
    dispatch.note_once.cache_clear()


def test_a_kernel_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """None takes XLA and says so once; the kernel by name is an error that says why."""
    args = experts()
    want = run(*args, implementation="xla")
    with without_triton(monkeypatch), caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_array_equal(run(*args), want)
        assert caplog.text.count("plain XLA instead of the kernels") == 1
        with pytest.raises(ValueError, match=r"'pallas' is not available.*Triton"):
            run(*args, implementation="pallas")
        weight = jax.tree.map(lambda array: array[0], args[2])
        linear(args[0], weight)
        assert "plain XLA instead of the kernel," in caplog.text
        with pytest.raises(ValueError, match=r"'pallas' is not available.*Triton"):
            linear(args[0], weight, implementation="pallas")


def test_what_the_kernels_cannot_compute_is_an_error_by_name(caplog: pytest.LogCaptureFixture) -> None:
    x, w13, w2, *rest = experts()
    asks = dataclasses.replace(w13, format=dataclasses.replace(w13.format, activation="mxfp4"))
    with pytest.raises(ValueError, match="w13 asks for its inputs to be quantised"):
        run(x, asks, w2, *rest, implementation="pallas")
    dispatch.note_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert bool(jnp.isfinite(run(x, asks, w2, *rest)).all())
    assert "w13 asks" in caplog.text


def test_on_a_cpu_none_is_xla() -> None:
    args = experts()
    np.testing.assert_array_equal(run(*args), run(*args, implementation="xla"))


@contextlib.contextmanager
def gpu(kind: str) -> Iterator[None]:
    """JAX 0.11 and later ask which GPU it is while lowering."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh  # type: ignore[attr-defined]

    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        yield


@pytest.mark.parametrize(
    ("platform", "kind", "order"),
    [("cuda", "NVIDIA H200", "rows"), ("cuda", "NVIDIA H200", "tiles"), ("rocm", "gfx942", "rows")],
)
def test_a_program_for_a_gpu_gets_the_kernels(platform: str, kind: str, order: str) -> None:
    """Without that GPU. Only weights in tile order, which are made on NVIDIA alone, take the tensor-core kernel."""
    x, w13, w2, *rest = experts()
    if order == "tiles":
        w13, w2 = arrange(w13), arrange(w2)
    with gpu(kind):
        text = jax.jit(run).trace(x, w13, w2, *rest).lower(lowering_platforms=(platform,)).as_text()
    assert "moe_gate_up" in text
    assert "moe_down" in text
    assert ("moe_gate_up_mma" in text) == (order == "tiles")


def test_float32_never_takes_the_bfloat16_kernel() -> None:
    x, w13, w2, *rest = experts(jnp.float32)
    with gpu("NVIDIA H200"):
        lowered = jax.jit(run).trace(x, arrange(w13), arrange(w2), *rest).lower(lowering_platforms=("cuda",))
    assert "moe_gate_up_mma" not in lowered.as_text()


def test_tile_order_gives_the_same_without_a_gpu() -> None:
    x, w13, w2, *rest = experts(jnp.float32)
    want = run(x, w13, w2, *rest, implementation="reference")
    for implementation in ("xla", "reference", "pallas", None):
        got = run(x, arrange(w13), arrange(w2), *rest, implementation=implementation)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
