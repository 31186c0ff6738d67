"""On one accelerator: the same logits as on CPU, and the batch that changes no bit.

MINIMAX_TEST_PLATFORM=gpu python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from minimax_jax import LLM, SamplingParams
from minimax_jax.tiny import TinyShape, make_tiny
from pallas_kernels.quant import QuantTensor
from tests.checkpoints import FIXTURE_NAMES, FIXTURES, read_expected

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_an_accelerator() -> None:
    assert jax.devices()[0].platform == "gpu", "run with MINIMAX_TEST_PLATFORM=gpu on a machine with a GPU"
    print(jax.__version__, jax.devices()[0].device_kind)


@pytest.mark.parametrize("name", FIXTURE_NAMES)
@pytest.mark.parametrize("placement", ["tensor", "expert"])
def test_logits_and_greedy_tokens(name: str, placement: str) -> None:
    directory = FIXTURES / f"tiny-{name}"
    llm = LLM(directory, dtype="float32", expert_parallel=placement == "expert", max_num_seqs=4, max_model_len=384)
    for prompt in read_expected(directory):
        got = llm.logits(prompt.ids)[-len(prompt.logits) :]
        assert np.abs(got - prompt.logits).max() <= 1e-4
        if prompt.greedy is not None:
            (output,) = llm.generate([prompt.ids], SamplingParams(temperature=0, max_tokens=16))
            assert list(output.outputs[0].token_ids) == prompt.greedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_batch_independence(dtype: str, weight_format: str, tmp_path: Path, seed: int) -> None:
    shape = TinyShape(vocab_size=512, num_hidden_layers=2)
    directory = make_tiny(tmp_path / "tiny", shape=shape, weight_format=weight_format)
    llm = LLM(directory, dtype=dtype, max_num_seqs=4, max_model_len=512)
    w13 = llm.runner.weights["layers.0.block_sparse_moe.experts.w13"]
    tiled = isinstance(w13, QuantTensor) and w13.format.order == "tiles"
    nvidia = "NVIDIA" in jax.devices()[0].device_kind
    assert tiled == (nvidia and dtype == "bfloat16" and weight_format in ("mxfp4", "nvfp4"))
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 512, n).tolist() for n in (3, 90, 130, 17)]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=12, logprobs=2) for t in (0.0, 1.0, 0.7, 0.0)]

    def run(order: tuple[int, ...]) -> dict[int, str]:
        transcripts = llm._transcripts([prompts[i] for i in order], [params[i] for i in order])
        for _ in llm._run(transcripts):
            pass
        outputs = (t.output().outputs[0] for t in transcripts)
        return {i: repr((o.token_ids, o.logprobs)) for i, o in zip(order, outputs, strict=True)}

    alone = {i: run((i,))[i] for i in range(4)}
    for order in itertools.permutations(range(4)):
        assert run(order) == alone
    assert llm.runner.programs.compiled <= 3
