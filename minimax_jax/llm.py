"""The Python API: a checkpoint directory or Hub repository in, text or token ids out."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from minimax_jax.checkpoint import has_kv_scales, load_parameters, open_checkpoint, plan_parameters
from minimax_jax.compilation_cache import use_compilation_cache
from minimax_jax.config import ModelConfig, Parallelism, load_config, load_generation_defaults
from minimax_jax.errors import ConfigError, RequestError
from minimax_jax.generation.limits import PREFILL_CHUNK
from minimax_jax.generation.loop import Settings
from minimax_jax.generation.runner import Runner
from minimax_jax.hub import resolve_model
from minimax_jax.kernel_order import arrange_experts, describe
from minimax_jax.memory import plan_memory
from minimax_jax.model import abstract_parameters
from minimax_jax.outputs import RequestOutput, SamplingParams
from minimax_jax.progress import Progress
from minimax_jax.requests import Prompt, Transcript, check_prompt, make_transcript, prompt_list, token_list
from minimax_jax.sharding import make_mesh
from minimax_jax.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

logger = logging.getLogger("minimax_jax")

_IMPLEMENTATIONS = (None, "pallas", "xla", "reference")
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


class LLM:
    """A loaded model that generates.

    The same request with the same seed gives the same tokens and log probabilities, to the bit, alone or with any
    neighbours, for one set of these options.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        kv_cache_dtype: str = "auto",
        emulate_activation_quant: bool = False,
        implementation: str | None = None,
        seed: int = 0,
        prefill_chunk_size: int = PREFILL_CHUNK,
        steps_per_call: int = 16,
        startup_timeout: float = 600.0,
        revision: str | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Load a model.

        Args:
          model: a checkpoint directory, or a Hub repository id.
          dtype: "bfloat16", "float32", or "auto" for what config.json says.
          tensor_parallel_size: devices that share one model.
          data_parallel_size: groups of such devices; rows are spread over them.
          expert_parallel: place whole experts on devices instead of splitting each one's width.
          max_model_len: tokens of one sequence, prompt and output; None takes the config's max_position_embeddings.
          max_num_seqs: rows of a step.
          kv_cache_dtype: "bfloat16", "float32", or "auto" for `dtype`.
          emulate_activation_quant: quantise and dequantise the inputs of quantised layers as the checkpoint's config
            declares, to compare with programs that do; False keeps them, which is more exact.
          implementation: of experts, packed layers and attention: "pallas" (interpreted without a GPU), "xla",
            "reference"; None takes the kernels for packed weights on a GPU, and XLA for the rest and elsewhere.
          seed: where requests without a seed draw theirs from.
          prefill_chunk_size: tokens of a row in one prefill step.
          steps_per_call: decode steps between two looks of the host; also how often a stream yields.
          startup_timeout: seconds that the first run of each program may take before it counts as hung.
          revision: of a Hub repository.
          devices: which to use; None takes the first of `jax.devices()`.

        Raises:
          ConfigError: an option, config or mesh that cannot be used.
          CheckpointError: a file that is missing, damaged, or does not fit the config.
        """
        _check_options(locals())
        path = resolve_model(os.fspath(model), revision=revision)
        self.config: ModelConfig = load_config(path)
        placement: Literal["tensor", "expert"] = "expert" if expert_parallel else "tensor"
        parallelism = Parallelism(data=data_parallel_size, model=tensor_parallel_size, experts=placement)
        self.config.check_parallelism(parallelism)
        mesh = make_mesh(parallelism, devices)
        compute = jnp.dtype(_DTYPES[self.config.dtype if dtype == "auto" else dtype])
        cache_dtype = compute if kv_cache_dtype == "auto" else jnp.dtype(_DTYPES[kv_cache_dtype])
        self.max_model_len = _context(max_model_len, self.config)
        self.defaults = load_generation_defaults(path, self.config)
        self.tokenizer: Tokenizer | None = load_tokenizer(path)
        if self.tokenizer is not None:
            check_vocabulary(self.tokenizer, self.config.vocab_size)
        use_compilation_cache()

        with open_checkpoint(path) as checkpoint:
            specs = abstract_parameters(self.config, parallelism, kv_scales=has_kv_scales(checkpoint.tensors))
            plan = plan_parameters(
                checkpoint, self.config, specs, parallelism, compute, emulate_activation_quant=emulate_activation_quant
            )
            sizes = {"max_num_seqs": max_num_seqs, "max_model_len": self.max_model_len, "chunk": prefill_chunk_size}
            memory = plan_memory(
                plan.bytes_per_device(), self.config, parallelism, **sizes,
                dtype=compute, cache_dtype=cache_dtype, devices=list(mesh.devices.flat),
            )  # fmt: skip
            logger.info("%s, kv cache %s, mesh (data %d, model %d), experts by %s; %s", compute.name, cache_dtype.name,
                        data_parallel_size, tensor_parallel_size, placement, memory.line())  # fmt: skip
            if plan.vision:
                logger.info("%d tensors of the vision tower and its projector left out", len(plan.vision))
            memory.check()
            weights = load_parameters(plan, specs, mesh, parallelism)
        weights = arrange_experts(weights, specs, mesh, parallelism, compute, implementation)
        logger.info(describe(weights, mesh, implementation))
        settings = Settings(self.config, parallelism, compute, steps_per_call, implementation)
        self.runner = Runner(settings, mesh, weights, **sizes, cache_dtype=cache_dtype, startup_timeout=startup_timeout)
        self._seeds = np.random.SeedSequence(seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the prompts' order.

        Args:
          prompts: one or a list of: a string, a list of token ids, {"prompt": str}, {"prompt_token_ids": [...]}.
          sampling_params: one for all, one each, or None for the checkpoint's own defaults.
          use_tqdm: show progress, a bar on a terminal and log lines elsewhere, when there is more than one batch.

        Raises:
          RequestError: a prompt or value that cannot be served; nothing has been computed then.
        """
        transcripts = self._transcripts(prompts, sampling_params)
        # Rows of like length share a batch; which rows meet never changes a row's result.
        order = sorted(range(len(transcripts)), key=lambda i: transcripts[i].work)
        rows = self.runner.max_num_seqs
        shown = use_tqdm and len(order) > rows
        with Progress("generating", len(order), "prompts") if shown else contextlib.nullcontext() as progress:
            for at in range(0, len(order), rows):
                batch = [transcripts[i] for i in order[at : at + rows]]
                for _ in self._run(batch):
                    pass
                if progress is not None:
                    progress.add(len(batch))
        return [transcript.output() for transcript in transcripts]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt; yields the growing output after every group of decode steps.

        Raises:
          RequestError: the prompt cannot be served, or another call used this LLM while the stream was open.
        """
        (transcript,) = self._transcripts([prompt], sampling_params)

        def outputs() -> Iterator[RequestOutput]:
            for _ in self._run([transcript]):
                yield transcript.output()

        return outputs()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, [T, V] float32, for checks against other implementations."""
        ids = token_list(token_ids)
        check_prompt(ids, self.config.vocab_size, self.max_model_len, new_tokens=0)
        return self.runner.logits(ids)

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends."""
        d = self.defaults
        return SamplingParams(temperature=d.temperature, top_p=d.top_p, top_k=d.top_k)

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None when it has none."""
        return self.tokenizer

    def _run(self, transcripts: Sequence[Transcript]) -> Iterator[None]:
        for pieces in self.runner.run([transcript.request for transcript in transcripts]):
            for transcript, piece in zip(transcripts, pieces, strict=True):
                transcript.add(piece)
            yield

    def _transcripts(self, prompts: Any, params: Any) -> list[Transcript]:
        listed = prompt_list(prompts)
        params = self.get_default_sampling_params() if params is None else params
        each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        if wrong := [p for p in each if not isinstance(p, SamplingParams)]:
            raise RequestError(f"sampling_params holds {wrong[0]!r}; expected SamplingParams, one for all or one each")
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(each)} sampling_params; give one for all or one each")
        return [
            make_transcript(
                prompt,
                p,
                codec=self.tokenizer,
                vocab_size=self.config.vocab_size,
                max_model_len=self.max_model_len,
                eos_token_ids=self.defaults.eos_token_ids,
                own_seed=self._seeds,
            )
            for prompt, p in zip(listed, each, strict=True)
        ]


def _check_options(options: dict[str, Any]) -> None:
    """Refuse option values that no later check would name."""
    for name in ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "prefill_chunk_size", "steps_per_call"):
        _positive(name, options[name])
    if not isinstance(options["model"], (str, os.PathLike)):
        raise ConfigError(f"model is {options['model']!r}; expected a directory or a Hub repository id")
    if not isinstance(options["seed"], int) or options["seed"] < 0:
        raise ConfigError(f"seed is {options['seed']!r}; expected an integer of at least 0")
    if options["max_model_len"] is not None:
        _positive("max_model_len", options["max_model_len"])
    if not isinstance(options["emulate_activation_quant"], bool):
        raise ConfigError(
            f"emulate_activation_quant is {options['emulate_activation_quant']!r}; expected True or False"
        )
    if not isinstance(options["startup_timeout"], int | float) or not options["startup_timeout"] > 0:
        raise ConfigError(f"startup_timeout is {options['startup_timeout']!r}; expected seconds above 0")
    if options["implementation"] not in _IMPLEMENTATIONS:
        raise ConfigError(f"implementation is {options['implementation']!r}; expected one of {_IMPLEMENTATIONS}")
    if options["emulate_activation_quant"] and options["implementation"] == "pallas":
        raise ConfigError(
            "emulate_activation_quant has no Pallas kernels; leave implementation out, or say 'xla' or 'reference'"
        )
    for name in ("dtype", "kv_cache_dtype"):
        if options[name] not in ("auto", *_DTYPES):
            raise ConfigError(f"{name} is {options[name]!r}; expected one of {['auto', *_DTYPES]}")
    if options["max_num_seqs"] % options["data_parallel_size"]:
        raise ConfigError(
            f"max_num_seqs {options['max_num_seqs']} is not divisible by data_parallel_size "
            f"{options['data_parallel_size']}; take a multiple of it"
        )


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected an integer of at least 1")


def _context(max_model_len: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len {max_model_len} is over the model's max_position_embeddings {longest}; lower it"
        )
    return longest if max_model_len is None else max_model_len
