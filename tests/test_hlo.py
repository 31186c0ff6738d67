"""What is read out of compiled HLO: collectives, and copies of weights, of functions small enough to judge by eye."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from minimax_jax.config import Parallelism
from minimax_jax.hlo import count_collectives, weight_sized_moves
from minimax_jax.sharding import make_mesh, shard_map

P = PartitionSpec
DEVICES, L, D, F = 4, 3, 256, 512
WEIGHT_BYTES = D * F // DEVICES * 4  # of one layer's w1 or w2 on one device

Weights = tuple[jax.Array, ...]


def compiled_text(fn: Callable[..., Any], *args: tuple[tuple[int, ...], PartitionSpec]) -> str:
    """Optimised HLO of `fn` under shard_map over four devices, float32 arguments of (shape, spec)."""
    mesh = make_mesh(Parallelism(model=DEVICES))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in args]
    mapped = shard_map(fn, mesh, tuple(spec for _, spec in args), P())
    return jax.jit(mapped).lower(*arrays).compile().as_text()


X = ((8, D), P())
LAYERS = (((D, F), P(None, "model")), ((F, D), P("model", None))) * L
STACKED = (((L, D, F), P(None, None, "model")), ((L, F, D), P(None, "model", None)))


def layer(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return x + lax.psum(jax.nn.silu(x @ w1) @ w2, "model")


def unrolled(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
        x = layer(x, w1, w2)
    return x


def scanned(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (layer(x, *w), None), x, (w1, w2))[0]


def looped(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """A decode loop: the weights are tied to the counter, as the model does it."""

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        _, tied = lax.optimization_barrier((i, weights))
        return unrolled(x, *tied)

    return lax.all_gather(lax.fori_loop(0, 5, body, x)[:, : D // DEVICES], "model", axis=1, tiled=True)


def test_unrolled_layers_copy_nothing() -> None:
    text = compiled_text(unrolled, X, *LAYERS)
    assert weight_sized_moves(text, WEIGHT_BYTES) == []
    assert count_collectives(text) == {"all-reduce": L}


def test_a_scan_over_stacked_weights_is_flagged() -> None:
    text = compiled_text(scanned, X, *STACKED)
    moves = weight_sized_moves(text, WEIGHT_BYTES)
    assert {(move.kind, move.source, move.bytes) for move in moves} == {
        ("dynamic-slice", "w1", WEIGHT_BYTES),
        ("dynamic-slice", "w2", WEIGHT_BYTES),
    }
    assert all(move.computation != "ENTRY" for move in moves)  # in the loop's body, so at every layer
    assert weight_sized_moves(text, WEIGHT_BYTES + 1) == []


def test_a_decode_loop_is_clean_and_counts_a_step() -> None:
    text = compiled_text(looped, X, *LAYERS)
    assert weight_sized_moves(text, WEIGHT_BYTES) == []
    assert count_collectives(text) == {"all-reduce": L, "all-gather": 1}


def test_no_collective_on_one_device() -> None:
    mesh = make_mesh(Parallelism())
    mapped = shard_map(layer, mesh, (P(), P(), P()), P())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, D), (D, F), (F, D))]
    assert count_collectives(jax.jit(mapped).lower(*arrays).compile().as_text()) == {}


@pytest.mark.parametrize(
    ("groups", "count"), [("{{0},{1}}", 0), ("[2,1]<=[2]", 0), ("{{0,1}}", 1), ("[1,2]<=[2]", 1), ("{}", 1)]
)
def test_a_collective_among_one_device_is_none(groups: str, count: int) -> None:
    text = f"""ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add
}}"""
    assert sum(count_collectives(text).values()) == count


def fused_weights(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.psum(x @ jnp.concatenate([a, b], axis=1), "model")


def expert_gather(x: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
    return lax.psum(jnp.einsum("nd,ndf->nf", x, w[ids.astype(jnp.int32)]), "model")


def embedding(ids: jax.Array, table: jax.Array) -> jax.Array:
    return lax.psum(table[ids.astype(jnp.int32)], "model")


def half_precision(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.psum(x.astype(jnp.bfloat16) @ lax.optimization_barrier(w.astype(jnp.bfloat16)), "model")


@pytest.mark.parametrize(
    ("fn", "args", "kind", "source"),
    [
        (fused_weights, (X, ((D, F), P(None, "model")), ((D, F), P(None, "model"))), "concatenate", "a"),
        (expert_gather, (X, ((8,), P()), ((16, D, F), P(None, None, "model"))), "gather", "w"),
        (half_precision, (X, ((D, F), P(None, "model"))), "convert", "w"),
    ],
)
def test_other_copies_are_flagged(fn: Callable[..., Any], args: Any, kind: str, source: str) -> None:
    moves = weight_sized_moves(compiled_text(fn, *args), WEIGHT_BYTES // 2)
    assert (kind, source) in {(move.kind, move.source) for move in moves}


def test_rows_of_an_embedding_are_no_weight() -> None:
    text = compiled_text(embedding, ((2048,), P()), ((4096, D), P("model", None)))
    assert weight_sized_moves(text, 4 * D + 1) == []  # the result is far larger, but one row is not
    assert [move.kind for move in weight_sized_moves(text, 4 * D)] == ["gather"]


def test_large_activations_are_no_weight() -> None:
    def wide(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        hidden = jnp.repeat(x, 64, axis=0) @ w1
        turned = lax.optimization_barrier(hidden.T + 0)  # a transpose that is computed, not an argument
        return lax.psum(lax.optimization_barrier(turned[:, :256]).T @ w2, "model")

    text = compiled_text(wide, X, *LAYERS[:2])
    assert weight_sized_moves(text, 4 * 256 * F // DEVICES) == []


# Lines as XLA's AMD back end prints them, shortened: asynchronous pairs, fusions whose root is a slice, a state that
# the loop hands on, one that it does not.
ROCM = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%region_1.1 (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add.6 = bf16[] add(%a, %b)
}

%fused_slice (param_0.18: bf16[4,1024,512], param_1.22: s32[]) -> (bf16[1024,512], s32[]) {
  %param_0.18 = bf16[4,1024,512]{2,1,0} parameter(0)
  %param_1.22 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %ds = bf16[1,1024,512]{2,1,0} dynamic-slice(%param_0.18, %param_1.22, %zero, %zero), dynamic_slice_sizes={1,1024,512}
  %bitcast.1 = bf16[1024,512]{1,0} bitcast(%ds)
  ROOT %tuple.1 = (bf16[1024,512]{1,0}, s32[]) tuple(%bitcast.1, %param_1.22)
}

%gemm (parameter_0: bf16[8,1024], parameter_1: bf16[4,1024,512], parameter_2: s32[]) -> bf16[8,512] {
  %parameter_0 = bf16[8,1024]{1,0} parameter(0)
  %parameter_1 = bf16[4,1024,512]{2,1,0} parameter(1)
  %parameter_2 = s32[] parameter(2)
  %inside = bf16[1,1024,512]{2,1,0} dynamic-slice(%parameter_1, %parameter_2, %parameter_2, %parameter_2), dynamic_slice_sizes={1,1024,512}
  %flat = bf16[1024,512]{1,0} bitcast(%inside)
  ROOT %dot.1 = bf16[8,512]{1,0} dot(%parameter_0, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (param: (s32[], bf16[8,1024], bf16[4,1024,512], bf16[512,1024])) -> (s32[], bf16[8,1024], bf16[4,1024,512], bf16[512,1024]) {
  %param = (s32[], bf16[8,1024]{1,0}, bf16[4,1024,512]{2,1,0}, /*index=3*/bf16[512,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%param), index=0
  %x = bf16[8,1024]{1,0} get-tuple-element(%param), index=1
  %w = bf16[4,1024,512]{2,1,0} get-tuple-element(%param), index=2
  %state = bf16[512,1024]{1,0} get-tuple-element(%param), index=3
  %sliced = (bf16[1024,512]{1,0}, s32[]) fusion(%w, %i), kind=kLoop, calls=%fused_slice, backend_config={"a":"(b"}
  %inner = bf16[8,512]{1,0} fusion(%x, %w, %i), kind=kCustom, calls=%gemm
  %state.copy = bf16[512,1024]{1,0} copy(%state)
  %negated = bf16[512,1024]{1,0} negate(%state.copy)
  %all-reduce-start = bf16[8,1024]{1,0} all-reduce-start(%x), channel_id=1, to_apply=%region_1.1
  %all-reduce-done = bf16[8,1024]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %tuple.8 = (s32[], bf16[8,1024]{1,0}, bf16[4,1024,512]{2,1,0}, bf16[512,1024]{1,0}) tuple(%i, %all-reduce-done, %w, %negated)
}

%condition (param.1: (s32[], bf16[8,1024], bf16[4,1024,512], bf16[512,1024])) -> pred[] {
  %param.1 = (s32[], bf16[8,1024]{1,0}, bf16[4,1024,512]{2,1,0}, bf16[512,1024]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%param.1), index=0
  ROOT %lt = pred[] compare(%j, %j), direction=LT
}

%wrapped (p: bf16[8,1024]) -> bf16[8,1024] {
  %p = bf16[8,1024]{1,0} parameter(0)
  ROOT %a2a = bf16[8,1024]{1,0} all-to-all(%p), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main.5_spmd (n: s32[], x0: bf16[8,1024], w0: bf16[4,1024,512], s0: bf16[512,1024]) -> bf16[8,1024] {
  %n = s32[] parameter(0), metadata={op_name="n"}
  %x0 = bf16[8,1024]{1,0} parameter(1), metadata={op_name="x"}
  %w0 = bf16[4,1024,512]{2,1,0} parameter(2), sharding={devices=[1,1,8]<=[8]}, metadata={op_name="weights[\\'w1\\']"}
  %s0 = bf16[512,1024]{1,0} parameter(3), metadata={op_name="state"}
  %prefetch = (bf16[512,1024]{1,0:S(5)}, bf16[512,1024]{1,0}, u32[]) copy-start(%s0)
  %prefetched = bf16[512,1024]{1,0:S(5)} copy-done(%prefetch)
  %tuple.6 = (s32[], bf16[8,1024]{1,0}, bf16[4,1024,512]{2,1,0}, bf16[512,1024]{1,0}) tuple(%n, %x0, %w0, %prefetched)
  %while.9 = (s32[], bf16[8,1024]{1,0}, bf16[4,1024,512]{2,1,0}, bf16[512,1024]{1,0}) while(%tuple.6), condition=%condition, body=%body
  %y = bf16[8,1024]{1,0} get-tuple-element(%while.9), index=1
  %start = ((bf16[8,1024]{1,0}), bf16[8,1024]{1,0}) async-start(%y), calls=%wrapped
  %done = bf16[8,1024]{1,0} async-done(%start)
  %gather-start = (bf16[8,1024]{1,0}, bf16[64,1024]{1,0}) all-gather-start(%done), dimensions={0}
  %gather-done = bf16[64,1024]{1,0} all-gather-done(%gather-start)
  ROOT %out = bf16[8,1024]{1,0} slice(%gather-done), slice={[0:8], [0:1024]}
}
"""  # noqa: E501


def test_asynchronous_pairs_count_once() -> None:
    assert count_collectives(ROCM) == {"all-reduce": 1, "all-to-all": 1, "all-gather": 1}


def test_moves_in_the_text_of_the_amd_back_end() -> None:
    moves = weight_sized_moves(ROCM, 2 * 1024 * 512)
    assert [(move.kind, move.name, move.computation, move.source) for move in moves] == [
        ("dynamic-slice", "sliced", "body", "weights['w1']"),  # the one inside %gemm makes no buffer
        ("copy", "prefetch", "ENTRY", "state"),  # once, and not in the body, whose state is computed anew
    ]
    assert str(moves[0]) == "dynamic-slice of weights['w1'], 1,048,576 bytes (sliced in body)"
