"""MiniMax-M3 as a whole: its checkpoints on every mesh, mistakes that must show, and any way to cut a prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax import LLM
from minimax_jax.cache import PAGE_TABLE_AXES, Cache, abstract_cache
from minimax_jax.config import MiniMaxM3Config, Parallelism, load_config
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.modules import decoder, indexer, moe, norms
from pallas_kernels.activation import SwiGLU
from pallas_kernels.quant import QuantTensor
from tests.checkpoints import read_expected
from tests.test_checkpoints import IMPLEMENTATIONS, MESHES, PLACEMENTS, check

NAMES = ("m3-bf16", "m3-mxfp8", "m3-mxfp4-quark", "m3-nvfp4-quark", "m3-nvfp4-quark-inmem")
RUNS = [
    (name, mesh, placement, implementation)
    for i, name in enumerate(NAMES)
    for j, mesh in enumerate(MESHES)
    for k, placement in enumerate(PLACEMENTS)
    for implementation in ("xla", *([IMPLEMENTATIONS[1 + (i + j + k) % 2]] if mesh[0] == 1 else []))
]
VISION = 43  # tensors of the tower and projector in each of the five


def path_of(shared: Path, name: str) -> Path:
    return shared / "data" / "checkpoints" / name


QUICK = ("m3-bf16", "m3-nvfp4-quark-inmem")  # plain and packed, each in one of the spellings; the others in every mesh


@pytest.mark.parametrize("name", QUICK)
def test_on_one_device(shared: Path, name: str) -> None:
    check(path_of(shared, name), (1, 1), "tensor")


@pytest.mark.parametrize(
    ("name", "mesh", "placement"), [("m3-mxfp8", (1, 4), "expert"), ("m3-mxfp4-quark", (2, 8), "tensor")]
)
def test_on_several_devices(shared: Path, name: str, mesh: tuple[int, int], placement: str) -> None:
    check(path_of(shared, name), mesh, placement, generate=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "placement", "implementation"), RUNS)
def test_on_every_mesh(shared: Path, name: str, mesh: tuple[int, int], placement: str, implementation: str) -> None:
    check(path_of(shared, name), mesh, placement, implementation, generate=implementation == "xla")


def test_activations_are_quantised_when_asked_for(shared: Path) -> None:
    """The option reaches every packed weight of the model that will run; left out, it is off."""
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 128}
    for asked, activations in (({"emulate_activation_quant": True}, {"mxfp4"}), ({}, {None})):
        llm = LLM(path_of(shared, "m3-mxfp4-quark"), **options, **asked)
        packed = [weight for weight in llm.runner.weights.values() if isinstance(weight, QuantTensor)]
        assert len(packed) == 3 * (2 + 3)  # of each sparse layer w13 and w2, and the shared expert's three
        assert {weight.format.activation for weight in packed} == activations


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_quantised_activations(shared: Path, name: str) -> None:
    """The whole model with the option on: not the logits without it, and not far from them."""
    prompt = next(prompt for prompt in read_expected(path_of(shared, name)) if len(prompt.ids) == 100)
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": 128}
    llm = LLM(path_of(shared, name), emulate_activation_quant=True, **options)
    on, off = llm.logits(prompt.ids)[-len(prompt.logits) :], prompt.logits
    similarity = np.sum(on * off, axis=1) / np.linalg.norm(on, axis=1) / np.linalg.norm(off, axis=1)
    print(f"{name}: largest difference {np.abs(on - off).max():.2f}, least similar {similarity.min():.3f}")
    assert np.abs(on - off).max() > 0.05
    assert similarity.min() > 0.7


def largest_error(shared: Path, name: str = "m3-bf16") -> float:
    """Of the logits of the prompt of 300 tokens, over six times as many as are selected."""
    file = np.load(path_of(shared, name) / "expected.npz")
    llm = LLM(path_of(shared, name), dtype="float32", max_num_seqs=1, max_model_len=384)
    got = llm.logits(file["prompt300_ids"].tolist())[-4:]
    return float(np.abs(got - file["prompt300_logits"]).max())


def test_mistakes_show(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is a way to be fluent and wrong; the smallest moves logits a hundred times the tolerance."""
    select = indexer.select_blocks

    def first_blocks(scores: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return select(
            -jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=scores.dtype), scores.shape), *args, **options
        )

    def over_heads(scores: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return select(jnp.broadcast_to(scores.max(axis=2, keepdims=True), scores.shape), *args, **options)

    def no_norm(self: norms.GemmaRMSNorm, x: jax.Array) -> jax.Array:
        return x

    def plain(self: norms.GemmaRMSNorm, x: jax.Array) -> jax.Array:
        wide = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return wide * norms.array(self.weight)

    def unscaled(logits: jax.Array, bias: jax.Array, k: int, scaling: float = 1.0) -> Any:
        return route(logits, bias, k)

    route = moe.route
    mistakes: list[tuple[Any, str, Any]] = [
        (indexer, "select_blocks", first_blocks),
        (indexer, "select_blocks", over_heads),
        (norms.GemmaRMSNorm, "__call__", no_norm),
        (norms.GemmaRMSNorm, "__call__", plain),
        (moe, "route", unscaled),
        (moe, "activation_of", lambda config: SwiGLU(config.swiglu_alpha, config.swiglu_beta, None)),
        (decoder, "activation_of", lambda config: SwiGLU()),
    ]
    assert largest_error(shared) < 1e-4
    for owner, name, mistake in mistakes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mistake)
            error = largest_error(shared)
            print(f"{name} as {getattr(mistake, '__name__', mistake)}: {error:.3f}")
            assert error > 1e-2


def test_what_sees_is_left_out_and_counted(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("m3-bf16", "m3-nvfp4-quark-inmem"):
        caplog.clear()
        with caplog.at_level("INFO", logger="minimax_jax"):
            LLM(path_of(shared, name), max_num_seqs=1, max_model_len=128)
        assert f"{VISION} tensors of the vision tower and its projector left out" in caplog.text


class Rows:
    """A model that takes tokens at any positions, a few rows at a time."""

    def __init__(self, directory: Path, rows: int) -> None:
        self.llm = LLM(directory, dtype="float32", max_num_seqs=rows, max_model_len=384)
        self.rows = rows
        self.cache: Cache = self.llm.runner._new_cache()

    def __call__(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[rows, T] each -> logits [rows, T, V]."""
        runner = self.llm.runner
        tokens, positions = (runner._rows(a.astype(np.int32), PAGE_TABLE_AXES) for a in (tokens, positions))
        self.cache, logits = runner.programs.all_logits(runner.weights, self.cache, tokens, positions)
        return np.asarray(logits)


def test_however_a_prompt_is_cut(shared: Path, seed: int) -> None:
    """Padded left, right and in between, ragged, in chunks and one by one; blocks go by position, never by place."""
    directory, n = path_of(shared, "m3-bf16"), 200
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 500, n)
    want = Rows(directory, 1)(ids[None], np.arange(n)[None])[0]
    worst = 0.0

    def compare(got: np.ndarray, what: str, expected: np.ndarray = want) -> None:
        nonlocal worst
        error = float(np.abs(got - expected).max())
        worst = max(worst, error)
        assert error <= 3e-5, what

    for left, right in ((40, 0), (0, 40), (7, 9)):
        tokens, positions = np.zeros((1, n + left + right), int), np.full((1, n + left + right), -1)
        tokens[0, left : left + n], positions[0, left : left + n] = ids, np.arange(n)
        compare(Rows(directory, 1)(tokens, positions)[0, left : left + n], f"padded by {left} and {right}")
    places = np.sort(rng.permutation(n + 30)[:n])
    tokens, positions = np.zeros((1, n + 30), int), np.full((1, n + 30), -1)
    tokens[0, places], positions[0, places] = ids, np.arange(n)
    compare(Rows(directory, 1)(tokens, positions)[0, places], "pads in between")

    for sizes in ((130, 70), (1, 199), (128, 72)):
        rows, start, parts = Rows(directory, 1), 0, []
        for size in sizes:
            parts.append(rows(ids[None, start : start + size], np.arange(start, start + size)[None])[0])
            start += size
        compare(np.concatenate(parts), f"in chunks of {sizes}")

    rows = Rows(directory, 1)
    one = [rows(ids[None, i : i + 1], np.full((1, 1), i))[0, 0] for i in range(n)]
    compare(np.stack(one), "one by one")

    # Three rows of other lengths beside it, the row itself in the middle, in two steps.
    rows, others = Rows(directory, 4), rng.integers(0, 500, (4, n))
    others[2] = ids
    lengths, got = (150, 31, n, 1), []
    for start, stop in ((0, 96), (96, n)):
        positions = np.array([[p if p < length else -1 for p in range(start, stop)] for length in lengths])
        got.append(rows(np.where(positions >= 0, others[:, start:stop], 0), positions)[2])
    compare(np.concatenate(got), "beside other rows")
    print(f"largest difference {worst:.1e}")


def test_sparse_is_dense_up_to_what_is_selected(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 3 blocks of 16: up to 48 tokens nothing is left out, and from the 49th on it is."""
    directory = path_of(shared, "m3-bf16")
    ids = np.random.default_rng(1).integers(0, 500, 64)
    sparse = Rows(directory, 1)(ids[None], np.arange(64)[None])[0]
    real = load_config(directory)
    assert isinstance(real, MiniMaxM3Config)
    everything = dataclasses.replace(real, index_topk_blocks=4)
    monkeypatch.setattr("minimax_jax.llm.load_config", lambda path: everything)
    dense = Rows(directory, 1)(ids[None], np.arange(64)[None])[0]
    assert np.abs(sparse - dense)[:48].max() <= 1e-5
    assert np.abs(sparse - dense)[48:].max() > 1e-2


def test_bad_input(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = path_of(shared, "m3-bf16")
    config = load_config(directory)
    assert isinstance(config, MiniMaxM3Config)
    sizes: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 128, "dtype": jnp.dtype(jnp.float32)}
    with pytest.raises(ConfigError, match="page size 24 is not a multiple of the model's index_block_size 16"):
        abstract_cache(config, Parallelism(), **sizes, page_size=24)
    with pytest.raises(ConfigError, match="max_model_len 4097 is over the model's max_position_embeddings 4096"):
        LLM(directory, max_model_len=4097)
    wider = dataclasses.replace(config, index_head_dim=64)
    monkeypatch.setattr("minimax_jax.llm.load_config", lambda path: wider)
    with pytest.raises(CheckpointError, match=r"index_q_proj\.weight.*index_n_heads 2 x index_head_dim 64"):
        LLM(directory, max_num_seqs=1, max_model_len=128)
