"""M3's dense MLP, shared expert and experts in one format or another: through the model's layers, and in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from minimax_jax.config import MiniMaxM3Config, Parallelism
from minimax_jax.generation.programs import weight_specs
from minimax_jax.model import Weights, abstract_parameters
from minimax_jax.modules.decoder import DecoderLayer
from minimax_jax.modules.parameter import Parameter
from minimax_jax.sharding import make_mesh, model_psum, shard_map
from pallas_kernels.activation import SwiGLU
from pallas_kernels.quant import QuantTensor
from tests.kernels.oracle import Packed, f32, moe, pack, plain, quantised, swiglu

N, DENSE, SPARSE = 5, 0, 1
PARTS = ("dense", "shared", "block")
OFF = "plain"


@dataclasses.dataclass
class Matrix:
    """A weight for numpy, and what its input is quantised to."""

    packed: Packed
    scheme: str | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [N, cols] float32 -> [N, rows] float64."""
        rows = x if self.scheme is None else quantised(x, self.scheme, self.packed.a)
        return rows.astype(np.float64) @ self.packed.decoded.T


@dataclasses.dataclass
class Case:
    """Two layers' weights: for JAX by path, for numpy by the part of their paths after the layer."""

    config: MiniMaxM3Config
    weights: Weights
    numpy: dict[str, Matrix]

    @property
    def activation(self) -> SwiGLU:
        return SwiGLU(self.config.swiglu_alpha, self.config.swiglu_beta, self.config.swiglu_limit)

    def expected(self, x: np.ndarray, nudge: float = 1.0) -> dict[str, np.ndarray]:
        """Each of PARTS for x [N, D], sums in float64."""
        dense = self._mlp("mlp.", x, nudge)
        shared = self._mlp("block_sparse_moe.shared_experts.", x, nudge)
        scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ self.numpy["block_sparse_moe.gate.weight"].packed.decoded.T)))
        bias = self.numpy["block_sparse_moe.e_score_correction_bias"].packed.blocks
        ids = np.argsort(-(scores + bias), axis=1)[:, : self.config.num_experts_per_tok]
        chosen = np.take_along_axis(scores, ids, axis=1)
        weights = chosen / chosen.sum(axis=1, keepdims=True) * self.config.routed_scaling_factor
        w13, w2 = (self.numpy[f"block_sparse_moe.experts.{name}"] for name in ("w13", "w2"))
        assert w13.scheme == w2.scheme
        routed = moe(x, w13.packed, w2.packed, ids, weights, self.activation, scheme=w13.scheme, nudge=nudge)
        return {"dense": dense, "shared": shared, "block": routed + shared}

    def _mlp(self, path: str, x: np.ndarray, nudge: float) -> np.ndarray:
        gate, up, down = (self.numpy[f"{path}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down((swiglu(gate(x), up(x), self.activation) * nudge).astype(f32))

    def inputs(self, rng: np.random.Generator, scale: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Inputs none of whose codes hangs on the last bits of a float32 sum, and what becomes of them."""
        for _ in range(20):
            x = (scale * rng.normal(size=(N, self.config.hidden_size))).astype(f32)
            want, *others = (self.expected(x, nudge) for nudge in (1.0, 1 - 3e-6, 1 + 3e-6))
            if all(
                np.abs(o[part] - want[part]).max() < 2e-5 * np.abs(want[part]).max() for o in others for part in PARTS
            ):
                return x, want
        raise AssertionError("twenty inputs with a code at a boundary each")

    def run(self, x: np.ndarray, devices: int = 1, implementation: Any = None, **options: Any) -> dict[str, np.ndarray]:
        """Each of PARTS as the model's own modules compute it."""
        parallelism = Parallelism(model=devices, **options)
        mesh = make_mesh(parallelism)
        specs = abstract_parameters(self.config, parallelism)
        weights = {path: value for path, value in self.weights.items() if _is_tested(path)}

        def parts(weights: Weights, x: jax.Array) -> tuple[jax.Array, ...]:
            dense, sparse = (_layer(self.config, i, parallelism, weights, implementation) for i in (DENSE, SPARSE))
            block = sparse.block_sparse_moe
            out = block(x[None], jnp.ones((1, N), bool))[0]
            return model_psum(dense.mlp(x)), model_psum(block.shared_experts(x)), out

        placed = {path: weight_specs(weights[path], specs[path].axes, parallelism) for path in weights}
        whole = PartitionSpec()
        out = jax.jit(shard_map(parts, mesh, (placed, whole), (whole,) * 3))(weights, jnp.asarray(x))
        return dict(zip(PARTS, map(np.asarray, out), strict=True))


def _is_tested(path: str) -> bool:
    return path.startswith((f"layers.{DENSE}.mlp.", f"layers.{SPARSE}.block_sparse_moe."))


def _layer(
    config: MiniMaxM3Config, index: int, parallelism: Parallelism, weights: Weights, implementation: Any
) -> DecoderLayer:
    """A layer of the model with those of its weights that there are."""
    layer = DecoderLayer(config, index, parallelism, implementation=implementation)
    for path, node in nnx.iter_graph(layer):
        name = f"layers.{index}." + ".".join(map(str, path))
        if isinstance(node, Parameter) and name in weights:
            node.set_value(weights[name])
    return layer


def check(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for part in PARTS:
        np.testing.assert_allclose(got[part], want[part], rtol=0, atol=1e-5 * np.abs(want[part]).max(), err_msg=part)


def switched_off(case: Case) -> Case:
    """The same weights, whose inputs stay as they are."""
    weights = {
        path: dataclasses.replace(value, format=dataclasses.replace(value.format, activation=None), input_scale=None)
        if isinstance(value, QuantTensor)
        else value
        for path, value in case.weights.items()
    }
    matrices = {name: dataclasses.replace(matrix, scheme=None) for name, matrix in case.numpy.items()}
    return Case(case.config, weights, matrices)


def config_of() -> MiniMaxM3Config:
    """A dense layer and a sparse one, whose widths leave whole groups of 32 on each of four devices."""
    return MiniMaxM3Config(
        vocab_size=64,
        hidden_size=192,
        intermediate_size=128,
        dense_intermediate_size=256,
        shared_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        rotary_dim=8,
        rope_theta=1e4,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        num_local_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=("dense", "sparse"),
        layer_types=("full_attention", "full_attention"),
        index_n_heads=1,
        index_head_dim=16,
        index_topk_blocks=2,
        index_block_size=16,
        routed_scaling_factor=2.0,
    )


def random_case(rng: np.random.Generator, kind: str) -> Case:
    """All linear layers in one format, that declares the quantisation of its inputs."""
    config = config_of()
    weights: Weights = {}
    matrices = {}
    for path, spec in abstract_parameters(config, Parallelism()).items():
        if not _is_tested(path):
            continue
        if spec.kind != "matrix":
            scheme, packed = None, plain(rng.normal(size=spec.shape).astype(f32) * 0.1)
        elif kind == OFF:
            scheme, packed = None, plain((0.1 * rng.normal(size=spec.shape)).astype(jnp.bfloat16))
        else:
            largest = 40.0 if "down" in path or "w2" in path else 10.0
            scheme = kind.split()[0]
            packed = pack(rng, spec.shape, kind, emulate=True, largest_input=largest)
        weights[path] = packed.weight
        matrices[path.split(".", 2)[2]] = Matrix(packed, scheme)
    return Case(config, weights, matrices)
