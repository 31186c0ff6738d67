"""The kernels at the shapes of M2 and M3, as cases for check_rocm_codegen.py to compile."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import _rocm_attention as attention

FORMATS = ("bfloat16", "fp8", "mxfp8", "mxfp4", "nvfp4")
BLOCKS = {"fp8": (128, 128), "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16)}
TENSOR_PARALLEL = (1, 2, 4, 8)
ROWS = {"few": 16, "many": 64}  # rows of x in a tile: least and most of `grouped_moe.kernel.block_rows`


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of one family's published models."""

    name: str
    D: int
    F: int
    E: int
    k: int
    heads: int
    kv_heads: int
    dense: tuple[int, ...] = ()  # widths of SwiGLU layers that are no routed experts
    head: int = 128
    sparse: tuple[int, int] = (0, 0)  # tokens of a block, blocks of a query; M3's sparse layers


MODELS = (
    Model("M2", D=3072, F=1536, E=256, k=8, heads=48, kv_heads=8),
    Model("M3", D=6144, F=3072, E=128, k=4, heads=64, kv_heads=4, dense=(3072, 12288), sparse=(128, 16)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape on one device of `tp`.

    Attributes:
      op: "gate_up", "down", "linear", one of `attention.OPS`, `attention.LANE`, or "scaled_dot", which is XLA's
        own and no path of the model.
      what: the weight's name; of attention the step's.
      format: of the weight, of attention the cache's.
      shape: of the weight, this device's part; of attention its `Sizes`.
      block: of its scales, None for bfloat16 and for attention.
      rows: "few" or "many".
      k: experts a token; 0 for linear and attention.
    """

    op: str
    model: str
    what: str
    tp: int
    format: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    rows: str
    k: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.model} {self.what} tp{self.tp} {self.format} {self.rows}"


def all_cases() -> list[Case]:
    """Every kernel at every shape; equal shapes of one op and format are listed once."""
    scaled = Case("scaled_dot", "M3", "up3072", 1, "mxfp4", (3072, 6144), (1, 32), "many", 0)
    cases: dict[tuple[Any, ...], Case] = {("scaled_dot",): scaled}
    for model, tp, format, rows in itertools.product(MODELS, TENSOR_PARALLEL, FORMATS, ROWS):
        F, D = model.F // tp, model.D
        whole = [("gate_up", "w13", (model.E, 2, F, D), -2), ("down", "w2", (model.E, D, F), -1)]
        if format in ("bfloat16", "fp8", "mxfp8"):
            q, kv = model.heads * model.head // tp, max(1, model.kv_heads // tp) * model.head
            whole += [("linear", "q", (q, D), -2), ("linear", "kv", (kv, D), -2), ("linear", "o", (D, q), -1)]
        if format != "bfloat16":
            for width in model.dense:
                whole += [
                    ("linear", f"up{width}", (width // tp, D), -2),
                    ("linear", f"down{width}", (D, width // tp), -1),
                ]
        for op, what, shape, split in whole:
            block = BLOCKS.get(format)
            if block is not None and tp > 1:  # what the loader makes of a block that a device's part cuts
                sizes = list(block)
                sizes[split] = math.gcd(sizes[split], shape[split])
                block = (sizes[0], sizes[1])
            k = 0 if op == "linear" else model.k
            case = Case(op, model.name, what, tp, format, shape, block, rows, k)
            cases.setdefault((op, format, shape, block, rows), case)
    shape = dataclasses.astuple(attention.sizes(MODELS[1], 1, "few"))
    cases[attention.LANE,] = Case(attention.LANE, "M3", "write and read", 1, "fp8", shape, None, "few", 0)
    for model, tp, rows, op, format in itertools.product(
        MODELS, TENSOR_PARALLEL, ROWS, attention.OPS, attention.FORMATS
    ):
        if op == "paged_attention" or model.sparse[0]:
            shape = dataclasses.astuple(attention.sizes(model, tp, rows))
            step = "decode" if rows == "few" else "prefill"
            cases.setdefault((op, format, shape), Case(op, model.name, step, tp, format, shape, None, rows, 0))
    return list(cases.values())


def program(case: Case, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted call of the case's kernel and its abstract arguments on `device`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.activation import SwiGLU
    from pallas_kernels.grouped_moe.kernel import down, gate_up
    from pallas_kernels.grouped_moe.routing import BlockPlan, max_blocks
    from pallas_kernels.linear.kernel import linear_pallas
    from pallas_kernels.quant import PAYLOAD_DTYPES, SCALE_DTYPES, Format, QuantTensor, codes_per_element

    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    if case.op in (*attention.OPS, attention.LANE):
        return attention.program(case.op, attention.Sizes(*case.shape), case.format, array)
    *lead, rows, cols = case.shape
    weight: Any = array(case.shape, jnp.bfloat16)
    if case.block is not None:
        payload = jnp.dtype(PAYLOAD_DTYPES[case.format])
        weight = QuantTensor(
            payload=array((*lead, rows, cols // codes_per_element(payload)), payload),
            scale=array((*lead, -(-rows // case.block[0]), -(-cols // case.block[1])), SCALE_DTYPES[case.format]),
            format=Format(case.format, case.block),
            global_scale=array(tuple(lead), jnp.float32) if case.format == "nvfp4" else None,
        )
    M = ROWS[case.rows]
    if case.op == "scaled_dot":
        fp4, e8m0, contract = jnp.float4_e2m1fn, jnp.float8_e8m0fnu, (((1,), (1,)), ((), ()))

        def product(x: Any, w: Any, x_scale: Any, w_scale: Any) -> Any:
            return jax.lax.scaled_dot(
                x,
                w,
                lhs_scale=x_scale,
                rhs_scale=w_scale,
                dimension_numbers=contract,
                preferred_element_type=jnp.bfloat16,
            )

        operands = [array((size, cols), fp4) for size in (4096, rows)]
        return jax.jit(product), (*operands, *(array((size, cols // 32), e8m0) for size in (4096, rows)))
    if case.op == "linear":
        return jax.jit(linear_pallas), (array((M if case.rows == "few" else 4096, cols), jnp.bfloat16), weight)
    E, k = case.shape[0], case.k
    N = 8 if case.rows == "few" else 4096
    blocks = array((max_blocks(N * k, E, M),), jnp.int32)
    plan = BlockPlan(array((N * k,), jnp.int32), blocks, blocks, blocks, M)
    if case.op == "gate_up":
        activation = SwiGLU() if case.model == "M2" else SwiGLU(1.702, 1.0, 7.0)
        fn = jax.jit(lambda x, w13, plan: gate_up(x, w13, plan, k, activation))
        return fn, (array((N, cols), jnp.bfloat16), weight, plan)
    fn = jax.jit(lambda hidden, w2, plan, weights: down(hidden, w2, plan, weights))
    return fn, (array((N * k, cols), jnp.bfloat16), weight, plan, array((N, k), jnp.float32))
