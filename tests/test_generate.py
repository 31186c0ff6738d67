"""`LLM.generate`: the same tokens whatever shares the batch, few programs, every field with an effect."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from minimax_jax import LLM, RequestOutput, SamplingParams
from minimax_jax.errors import RequestError
from minimax_jax.generation.runner import Piece
from minimax_jax.tiny import TinyShape, make_tiny

SHAPE = TinyShape(vocab_size=512, num_hidden_layers=2)
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
LENGTHS = (3, 90, 130, 17)  # of the ragged prompts; one spans two chunks
MESHES = [(1, 1, False), (2, 4, True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", shape=SHAPE, weight_format="fp8")


def load(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, **{"dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, **options})


@pytest.fixture(scope="module", params=MESHES, ids=["mesh 1x1", "mesh 2x4 expert"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> LLM:
    data, model, expert = request.param
    return load(checkpoint, data_parallel_size=data, tensor_parallel_size=model, expert_parallel=expert)


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> LLM:
    return load(checkpoint)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, length).tolist()


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def exact(output: RequestOutput) -> tuple[Any, ...]:
    """Everything of an output that must not change, floats to the bit."""
    completion = output.outputs[0]
    logprobs = [{i: entry.logprob for i, entry in step.items()} for step in completion.logprobs or ()]
    return completion.token_ids, repr(logprobs), completion.finish_reason, completion.text


class TestBatchIndependence:
    def test_alone_together_and_in_every_order(self, llm: LLM, seed: int) -> None:
        prompts = [ids(seed + n, n) for n in LENGTHS]
        params = [
            GREEDY,
            dataclasses.replace(GREEDY, temperature=1.0, seed=1),
            dataclasses.replace(GREEDY, temperature=0.7, top_k=5, top_p=0.8, seed=2),
            GREEDY,
        ]
        alone = [exact(llm.generate([p], s)[0]) for p, s in zip(prompts, params, strict=True)]
        for order in itertools.permutations(range(4)):
            # The rows' order, not only the caller's: through the runner, which fills slots as they come.
            transcripts = llm._transcripts([prompts[i] for i in order], [params[i] for i in order])
            for _ in llm._run(transcripts):
                pass
            assert [exact(t.output()) for t in transcripts] == [alone[i] for i in order]

    def test_a_seeded_request_among_any_neighbours(self, one: LLM, seed: int) -> None:
        prompt = ids(seed, 20)
        mine = SamplingParams(temperature=1.0, seed=42, max_tokens=32, ignore_eos=True)
        others = {
            "greedy": SamplingParams(temperature=0, max_tokens=20),
            "unseeded": SamplingParams(temperature=1.0, max_tokens=40),
            "filtered": SamplingParams(temperature=1.3, top_k=7, top_p=0.5, seed=7, max_tokens=9),
        }
        alone = tokens(one.generate([prompt], mine)[0])
        assert len(alone) == 32
        for other in others.values():
            first, _ = one.generate([prompt, ids(seed + 1, 50)], [mine, other])
            _, last = one.generate([ids(seed + 1, 5), prompt], [other, mine])
            assert tokens(first) == tokens(last) == alone

    def test_a_batch_of_one_is_as_long_as_of_two(self, one: LLM, seed: int) -> None:
        prompt, params = ids(seed, 12), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        (alone,) = one.generate([prompt], params)
        twice = one.generate([prompt, prompt], params)
        assert len(tokens(alone)) == 64
        assert tokens(alone) == tokens(twice[0]) == tokens(twice[1])

    @pytest.mark.slow
    def test_many_neighbours(self, checkpoint: Path, seed: int) -> None:
        many = load(checkpoint, max_num_seqs=44, max_model_len=128, prefill_chunk_size=32)
        prompt = ids(seed, 12)
        alone = exact(many.generate([prompt], GREEDY)[0])
        for size in (2, 8, 44):
            for _ in range(5):
                assert {exact(o) for o in many.generate([prompt] * size, GREEDY)} == {alone}

    def test_positions_are_the_rows_own(self, one: LLM, seed: int) -> None:
        """A short prompt beside a long one, and one that holds the id that pads are filled with."""
        short, long, zeros = ids(seed, 3), ids(seed + 1, 90), [0, 5, 0, 0]
        together = one.generate([short, long, zeros], GREEDY)
        assert [exact(o) for o in together] == [exact(one.generate([p], GREEDY)[0]) for p in (short, long, zeros)]
        # Against the model's own logits, which know nothing of batches.
        assert tokens(together[2])[0] == int(one.logits(zeros)[-1].argmax())

    def test_replicas_hold_the_same_bits(self, checkpoint: Path, seed: int) -> None:
        spread = load(checkpoint, data_parallel_size=2, tensor_parallel_size=4)
        spread.generate([ids(seed + n, n) for n in LENGTHS], GREEDY)
        runner = spread.runner
        # Logits are declared equal on the devices that share a model; key/value heads 0,0,1,1 lie on two devices each.
        tokens_, positions, last = runner._chunk([ids(seed, 30)] * 4, range(4), 4, 0)
        logits = runner._rows(np.zeros((4, SHAPE.vocab_size), np.float32))
        runner._cache, logits = runner.programs.prefill(runner.weights, runner._cache, tokens_, positions, last, logits)
        copies = self.copies(logits, lambda index: (index[0].start or 0,))
        assert sorted(map(len, copies.values())) == [4, 4]
        lane = runner._cache.layers[-1].k
        heads = self.copies(lane, lambda index: (index[0].start or 0, (index[2].start or 0) // 2))
        assert sorted(map(len, heads.values())) == [2, 2, 2, 2]
        for same in (*copies.values(), *heads.values()):
            assert len(set(same)) == 1

    @staticmethod
    def copies(array: jax.Array, part: Any) -> dict[Any, list[bytes]]:
        found: dict[Any, list[bytes]] = {}
        for shard in array.addressable_shards:
            found.setdefault(part(shard.index), []).append(np.asarray(shard.data).tobytes())
        return found


class TestCompilation:
    def test_lengths_compile_nothing_new(self, checkpoint: Path, seed: int) -> None:
        fresh = load(checkpoint)
        prompts = [ids(seed + n, n) for n in range(1, 201)]
        params = SamplingParams(temperature=0, max_tokens=2)
        first = [tokens(o) for o in fresh.generate(prompts, params)]
        assert fresh.runner.programs.compiled <= 3  # prefill of one chunk size, first token, decode
        second = [tokens(o) for o in fresh.generate(prompts, [dataclasses.replace(params, logprobs=1)] * 200)]
        fresh.generate(prompts[:5], SamplingParams(temperature=1.0, top_k=3, top_p=0.9, stop_token_ids=[1, 2]))
        assert fresh.runner.programs.compiled <= 3
        assert first == second

    def test_chunk_size_moves_no_logit(self, checkpoint: Path, one: LLM, seed: int) -> None:
        prompt = ids(seed, 200)
        whole = one.logits(prompt)
        assert whole.shape == (200, SHAPE.vocab_size)
        for chunk in (64, 200):
            other = load(checkpoint, prefill_chunk_size=chunk).logits(prompt)
            np.testing.assert_allclose(other, whole, atol=2e-5)


class TestFields:
    """Each sampling field changes the result."""

    @pytest.fixture
    def prompt(self, seed: int) -> list[int]:
        return ids(seed, 10)

    def test_temperature(self, one: LLM, prompt: list[int]) -> None:
        cold, warm = (one.generate([prompt], SamplingParams(temperature=t, seed=1))[0] for t in (0.0, 5.0))
        assert tokens(cold) != tokens(warm)

    def test_a_vanishing_temperature_is_greedy(self, one: LLM, prompt: list[int]) -> None:
        cold = one.generate([prompt], SamplingParams(temperature=0.0))[0]
        for t in (1e-5, 1e-6, 1e-300):
            assert tokens(one.generate([prompt], SamplingParams(temperature=t, seed=1))[0]) == tokens(cold)

    def test_top_k(self, one: LLM, prompt: list[int]) -> None:
        greedy, k1, free = (
            one.generate([prompt], SamplingParams(temperature=t, top_k=k, seed=1))[0]
            for t, k in ((0.0, 0), (5.0, 1), (5.0, -1))
        )
        assert tokens(greedy) == tokens(k1) != tokens(free)

    def test_top_p(self, one: LLM, prompt: list[int]) -> None:
        greedy, narrow, free = (
            one.generate([prompt], SamplingParams(temperature=t, top_p=p, seed=1))[0]
            for t, p in ((0.0, 1.0), (5.0, 1e-6), (5.0, 1.0))
        )
        assert tokens(greedy) == tokens(narrow) != tokens(free)

    def test_seed(self, one: LLM, prompt: list[int]) -> None:
        def draw(seed: int) -> tuple[int, ...]:
            return tokens(one.generate([prompt], SamplingParams(temperature=1.0, seed=seed))[0])

        runs = {s: draw(s) for s in (0, 1, 2**40, -2)}
        assert len(set(runs.values())) == 4
        assert all(draw(s) == want for s, want in runs.items())

    def test_without_a_seed_every_request_draws_its_own(self, one: LLM, prompt: list[int]) -> None:
        outputs = one.generate([prompt] * 3, SamplingParams(temperature=3.0))
        assert len({tokens(o) for o in outputs}) == 3

    def test_max_tokens(self, one: LLM, prompt: list[int]) -> None:
        for n in (1, 5, 16, 17, 40):
            (output,) = one.generate([prompt], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
            assert (len(tokens(output)), output.outputs[0].finish_reason) == (n, "length")

    def test_max_tokens_ends_with_the_context(self, one: LLM, seed: int) -> None:
        prompt = ids(seed, 500)
        for n in (None, 400):
            (output,) = one.generate([prompt], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
            assert (len(tokens(output)), output.outputs[0].finish_reason) == (12, "length")

    def test_stop_token_ids(self, one: LLM, prompt: list[int]) -> None:
        free = tokens(one.generate([prompt], dataclasses.replace(GREEDY, ignore_eos=True))[0])
        at = next(i for i in range(1, 8) if free[i] not in free[:i])
        (output,) = one.generate([prompt], dataclasses.replace(GREEDY, stop_token_ids=[free[at]]))
        assert tokens(output) == free[: at + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", free[at])
        assert output.outputs[0].text == one.tokenizer.decode(free[:at])  # the stop token is no part of the text
        with pytest.raises(RequestError, match="stop_token_ids has 2147483648"):
            one.generate([prompt], dataclasses.replace(GREEDY, stop_token_ids=[2**31]))

    def test_any_of_several_eos_ids_ends_a_row_and_ignore_eos_does_not(
        self, one: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = tokens(one.generate([prompt], dataclasses.replace(GREEDY, ignore_eos=True))[0])
        third = free[2]
        assert third not in free[:2], "choose another seed"
        for eos in ((third, 511), (511, third)):
            monkeypatch.setattr(one, "defaults", dataclasses.replace(one.defaults, eos_token_ids=eos))
            (output,) = one.generate([prompt], GREEDY)
            assert tokens(output) == free[:3]
            assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
            assert tokens(one.generate([prompt], dataclasses.replace(GREEDY, ignore_eos=True))[0]) == free

    def test_logprobs(self, one: LLM, prompt: list[int]) -> None:
        (output,) = one.generate([prompt], dataclasses.replace(GREEDY, temperature=1.0, seed=3, max_tokens=3))
        completion = output.outputs[0]
        sequence = list(prompt)
        total = 0.0
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            logits = one.logits(sequence)[-1].astype(np.float64)
            want = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            likeliest = np.argsort(-want)[:3].tolist()
            assert set(entry) == {token, *likeliest}
            for id_, given in entry.items():
                assert given.logprob == pytest.approx(want[id_], abs=1e-4)
                assert given.rank == 1 + int((want > want[id_]).sum())
                assert given.decoded_token == one.tokenizer.decode([id_], skip_special_tokens=False)
            total += entry[token].logprob
            sequence.append(token)
        assert completion.cumulative_logprob == pytest.approx(total)
        (without,) = one.generate([prompt], dataclasses.replace(GREEDY, logprobs=None))
        assert without.outputs[0].logprobs is None
        assert without.outputs[0].cumulative_logprob is None

    def test_skip_special_tokens_and_detokenize(self, one: LLM, prompt: list[int]) -> None:
        special = one.tokenizer.encode("[e~[")
        assert len(special) == 1
        for changes, text in (({}, ""), ({"skip_special_tokens": False}, "[e~["), ({"detokenize": False}, None)):
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, **changes)
            (transcript,) = one._transcripts([prompt], params)
            transcript.add(Piece(np.array(special)))
            assert transcript.output().outputs[0].text == text

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("n", 2), ("min_p", 0.1), ("presence_penalty", 0.5), ("frequency_penalty", 1.0),
            ("repetition_penalty", 1.1), ("stop", ["x"]), ("bad_words", ["x"]), ("min_tokens", 1),
            ("prompt_logprobs", 1), ("logit_bias", {1: 2.0}), ("include_stop_str_in_output", True),
        ],
    )  # fmt: skip
    def test_what_has_no_effect_is_refused_by_name(self, field: str, value: Any) -> None:
        with pytest.raises(RequestError, match=f"^{field}=.* is not supported"):
            SamplingParams(**{field: value})

    def test_every_public_field_is_tested_here(self) -> None:
        supported = {
            "temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs",
            "skip_special_tokens", "detokenize",
        }  # fmt: skip
        refused = {mark[0] for mark in self.test_what_has_no_effect_is_refused_by_name.pytestmark[0].args[1]}
        assert {field.name for field in dataclasses.fields(SamplingParams)} == supported | refused


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"), ("temperature", True),
            ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")), ("top_k", -2), ("top_k", 1.5), ("seed", 1.0),
            ("seed", 2**64), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.0), ("logprobs", -1),
            ("logprobs", 21), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", "12"),
            ("stop_token_ids", 5),
            ("stop_token_ids", list(range(40))),
        ],
    )  # fmt: skip
    def test_values(self, field: str, value: Any) -> None:
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty"), ([[]], "the prompt is empty"),
            ([[1, 2], []], "the prompt is empty"), ([[512]], "512 is not in the vocabulary; expected 0 to 511"),
            ([[-1]], "-1 is not in the vocabulary"), ([[1.5]], "1.5 is not in the vocabulary"),
            ([[1] * 512], "the prompt has 512 tokens, the context max_model_len 512"), ([{"text": "x"}], "keys"),
            ([None], "NoneType"),
            (None, "prompts is a NoneType"),
            (np.array(3), "prompts is a ndarray"), ({1: 2, "a": 3}, "keys"),
            (5, "prompts is a int"), (b"ab", "prompts is a bytes"),
            ([{"prompt_token_ids": "ab"}], "prompt is a str"),
        ],
    )  # fmt: skip
    def test_prompts_before_any_compute(
        self, one: LLM, prompt: Any, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(one.runner, "run", lambda requests: pytest.fail("computed before the prompts were checked"))
        with pytest.raises(RequestError, match=message):
            one.generate(prompt, GREEDY)

    def test_as_many_params_as_prompts(self, one: LLM) -> None:
        with pytest.raises(RequestError, match="2 prompts but 3 sampling_params"):
            one.generate([[1], [2]], [GREEDY] * 3)

    def test_logits_take_a_whole_context_and_no_more(self, one: LLM, seed: int) -> None:
        assert one.logits(np.array(ids(seed, 512))).shape == (512, SHAPE.vocab_size)
        with pytest.raises(RequestError, match="513 tokens"):
            one.logits(ids(seed, 513))


class TestForms:
    def test_prompt_forms(self, one: LLM) -> None:
        text = "Natalia sold clips"
        encoded = one.tokenizer.encode(text)
        forms = [text, encoded, {"prompt": text}, {"prompt_token_ids": encoded}, np.asarray(encoded), tuple(encoded)]
        outputs = one.generate(forms, GREEDY)
        assert len({exact(o) for o in outputs}) == 1
        assert [o.prompt for o in outputs] == [text, None, text, None, None, None]
        assert {o.prompt_token_ids for o in outputs} == {tuple(encoded)}
        assert exact(one.generate(text, GREEDY)[0]) == exact(one.generate(encoded, GREEDY)[0]) == exact(outputs[0])

    def test_no_prompts_no_outputs(self, one: LLM) -> None:
        assert one.generate([], GREEDY) == []

    def test_outputs_keep_the_prompts_order(self, one: LLM, seed: int) -> None:
        prompts = [ids(seed + n, n) for n in (40, 2, 30, 7, 21, 1, 11)]
        assert [list(o.prompt_token_ids) for o in one.generate(prompts, GREEDY)] == prompts

    def test_stream_grows_into_the_same_output(self, one: LLM, seed: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompt = ids(seed, 9)
        parts = list(one.stream(prompt, params))
        assert [len(tokens(p)) for p in parts] == [1, 17, 33, 40]
        assert [p.finished for p in parts] == [False, False, False, True]
        assert exact(parts[-1]) == exact(one.generate([prompt], params)[0])
        for earlier, later in itertools.pairwise(parts):
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)

    def test_a_stream_left_early_harms_nobody(self, one: LLM, seed: int) -> None:
        prompt = ids(seed, 9)
        want = exact(one.generate([prompt], GREEDY)[0])
        stream: Iterator[RequestOutput] = one.stream(ids(seed + 1, 100), SamplingParams(max_tokens=60))
        next(stream)
        next(stream)
        assert exact(one.generate([prompt], GREEDY)[0]) == want

    def test_a_stream_that_another_call_displaced_says_so(self, one: LLM, seed: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for other in (lambda: one.generate([ids(seed, 30)], GREEDY), lambda: one.logits(ids(seed, 30))):
            stream = one.stream(ids(seed + 1, 20), params)
            next(stream)
            other()
            with pytest.raises(RequestError, match="another call used this LLM"):
                list(stream)

    def test_an_interrupted_step_leaves_a_usable_model(
        self, one: LLM, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = ids(seed, 9)
        want = exact(one.generate([prompt], GREEDY)[0])
        decode = one.runner.programs.decode

        def interrupted(*args: Any) -> None:
            decode(*args)  # takes the cache with it
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(one.runner.programs, "decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.generate([prompt], GREEDY)
        assert exact(one.generate([prompt], GREEDY)[0]) == want

    def test_cache_dtype(self, checkpoint: Path) -> None:
        half = load(checkpoint, kv_cache_dtype="bfloat16", max_num_seqs=1, max_model_len=128)
        assert half.runner._cache.layers[0].k.dtype == "bfloat16"

    def test_defaults_come_from_the_checkpoint(self, one: LLM, seed: int) -> None:
        d = one.get_default_sampling_params()
        assert (d.temperature, d.top_p, d.top_k) == (1.0, 0.95, 40)
        assert len(one.generate([ids(seed, 5)])) == 1

    def test_bfloat16_runs_and_mostly_agrees(self, checkpoint: Path, one: LLM, seed: int) -> None:
        half = load(checkpoint, dtype="auto")
        logits, want = (m.logits(ids(seed, 60)) for m in (half, one))
        # A flipped expert moves a position's logits by more; most positions have none.
        near = np.abs(logits - want).max(axis=1) < 0.1 * want.std()
        assert near.mean() > 0.5
