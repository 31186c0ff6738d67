"""What a checkpoint directory holds and what it would cost on a mesh; reads no weight and touches no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from minimax_jax.checkpoint import Checkpoint, LoadPlan, has_kv_scales, open_checkpoint, plan_parameters
from minimax_jax.config import MiniMaxM3Config, ModelConfig, Parallelism, load_config, load_generation_defaults
from minimax_jax.errors import ConfigError, MinimaxError
from minimax_jax.generation.limits import PREFILL_CHUNK
from minimax_jax.memory import plan_memory
from minimax_jax.model import abstract_parameters
from minimax_jax.text.tokenizer import check_vocabulary, load_tokenizer

_LABEL = 12  # columns
_FILES_LISTED = 8
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def describe_checkpoint(
    directory: Path,
    parallelism: Parallelism,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    prefill_chunk_size: int = PREFILL_CHUNK,
) -> Iterator[str]:
    """Lines for people, section after section: what comes before a problem is told before it is raised.

    Raises:
      CheckpointError: files that are damaged, or that do not match their config tensor for tensor.
      ConfigError: a config or option that cannot be used.
    """
    with open_checkpoint(directory) as checkpoint:
        stored = [
            *_section("checkpoint", [str(directory)]),
            *_section("files", _files(checkpoint)),
            *_section("stored as", _dtypes(checkpoint)),
        ]
        try:
            config = load_config(directory)
        except MinimaxError:
            yield from stored  # a model that cannot be run can still be looked at
            raise
        context = _check_plan(config, parallelism, max_model_len, max_num_seqs)
        yield from stored
        yield from _section("model", _model(config))
        yield from _section("generation", [_generation(directory, config)])
        yield from _section("tokenizer", [_tokenizer(directory, config)])

        compute = jnp.dtype(_DTYPES[config.dtype if dtype == "auto" else dtype])
        specs = abstract_parameters(config, parallelism, kv_scales=has_kv_scales(checkpoint.tensors))
        plan = plan_parameters(checkpoint, config, specs, parallelism, compute)
        yield from _section("formats", _formats(plan))
        plan.check_scales()
        yield from _section("coverage", _coverage(plan))

    cache_dtype = compute if kv_cache_dtype == "auto" else jnp.dtype(_DTYPES[kv_cache_dtype])
    memory = plan_memory(
        plan.bytes_per_device(),
        config,
        parallelism,
        max_num_seqs=max_num_seqs,
        max_model_len=context,
        chunk=prefill_chunk_size,
        dtype=compute,
        cache_dtype=cache_dtype,
    )
    placed = "whole on a device" if parallelism.experts == "expert" else "each cut by its width"
    lines = [
        f"on each of {parallelism.data * parallelism.model} devices: data {parallelism.data} x model "
        f"{parallelism.model}, experts {placed}, computing in {compute.name}",
        f"weights    {size(memory.weights)}",
        f"kv cache   {size(memory.cache)} ({max_num_seqs} sequences of {context} tokens, {cache_dtype.name})",
        f"workspace  {size(memory.workspace)}",
        f"total      {size(memory.total)}",
    ]
    yield from _section("memory", lines)


def size(count: int) -> str:
    """Bytes for people, with the exact number."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.2f} {unit} ({count} bytes)"


def _check_plan(config: ModelConfig, parallelism: Parallelism, max_model_len: int | None, max_num_seqs: int) -> int:
    """The context's length, after what `LLM` would refuse has been refused."""
    config.check_parallelism(parallelism)
    if max_num_seqs % parallelism.data:
        raise ConfigError(
            f"max_num_seqs {max_num_seqs} is not divisible by data_parallel_size {parallelism.data}; "
            f"take a multiple of {parallelism.data}"
        )
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len {max_model_len} is over the model's max_position_embeddings {longest}; lower it"
        )
    return longest if max_model_len is None else max_model_len


def _section(label: str, lines: list[str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        yield f"{label if i == 0 else '':{_LABEL}}{line}"


def _files(checkpoint: Checkpoint) -> list[str]:
    tensors = Counter(info.file for info in checkpoint.tensors.values())
    sizes = {file: (checkpoint.directory / file).stat().st_size for file in sorted(tensors)}
    lines = [f"{len(sizes)} safetensors, {len(checkpoint.tensors)} tensors, {size(sum(sizes.values()))}"]
    if len(sizes) <= _FILES_LISTED:
        lines += [f"{file}  {tensors[file]} tensors, {size(count)}" for file, count in sizes.items()]
    else:
        lines.append(f"{min(sizes)} to {max(sizes)}, {size(min(sizes.values()))} to {size(max(sizes.values()))} each")
    unlisted = sorted(path.name for path in checkpoint.directory.glob("*.safetensors") if path.name not in sizes)
    if unlisted:
        lines.append(f"{len(unlisted)} more that the index does not list, not used: {', '.join(unlisted[:5])}")
    return lines


def _dtypes(checkpoint: Checkpoint) -> list[str]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        counts[info.dtype] += 1
        sizes[info.dtype] += info.nbytes
    return [f"{dtype:16}{counts[dtype]:8} tensors  {size(sizes[dtype])}" for dtype in sorted(counts)]


def _model(config: ModelConfig) -> list[str]:
    quantization = "not quantised"
    if config.quantization is not None:
        quantization = config.quantization.describe()
    lines = [
        "MiniMax-M3 (model_type minimax_m3_vl)"
        if isinstance(config, MiniMaxM3Config)
        else "MiniMax-M2 (model_type minimax_m2)",
        f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, vocabulary {config.vocab_size}, "
        f"context {config.max_position_embeddings}",
        f"{config.num_attention_heads} query heads and {config.num_key_value_heads} key/value heads of "
        f"{config.head_dim} channels, {config.rotary_dim} of them rotated (theta {config.rope_theta:g})",
        f"{config.num_local_experts} experts of width {config.intermediate_size}, "
        f"{config.num_experts_per_tok} for each token",
    ]
    if isinstance(config, MiniMaxM3Config):
        sparse, dense = config.layer_types.count("minimax_m3_sparse"), config.mlp_layer_types.count("dense")
        lines += [
            f"a shared expert of width {config.shared_intermediate_size}; {dense} layers have an MLP of width "
            f"{config.dense_intermediate_size} in place of experts",
            f"{sparse} layers attend to {config.index_topk_blocks} blocks of {config.index_block_size} tokens",
        ]
    return [*lines, f"config says {config.dtype}, {quantization}"]


def _generation(directory: Path, config: ModelConfig) -> str:
    d = load_generation_defaults(directory, config)
    eos = ", ".join(map(str, d.eos_token_ids)) or "none"
    return f"eos {eos}; by default temperature {d.temperature:g}, top_p {d.top_p:g}, top_k {d.top_k or 'all'}"


def _tokenizer(directory: Path, config: ModelConfig) -> str:
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        return "none: token ids in, token ids out"
    check_vocabulary(tokenizer, config.vocab_size)
    template = "with a chat template" if tokenizer.has_chat_template else "no chat template"
    return f"ids 0 to {tokenizer.vocab_size - 1}, {template}"


def _formats(plan: LoadPlan) -> list[str]:
    """A line for each format in each group of modules, the groups in the model's order; then the totals."""
    lines, weights, stored = [], Counter[str](), Counter[str]()
    for (group, label), total in plan.formats.items():
        lines.append(_format_line(group, label, total.tensors, total.bytes))
        weights[label] += total.tensors
        stored[label] += total.bytes
    return lines + [_format_line("all", label, weights[label], stored[label]) for label in sorted(weights)]


def _format_line(group: str, label: str, weights: int, stored: int) -> str:
    return f"{group:14}{label:16}{weights:8} weights  {size(stored)}"


def _coverage(plan: LoadPlan) -> list[str]:
    used = sum(len(names) for names in plan.sources.values())
    total = len(plan.checkpoint.tensors)
    lines = [f"{used} of {total} tensors used, each once; {len(plan.weights)} of {len(plan.specs)} parameters filled"]
    if plan.scales:
        lines.append(f"{len(plan.scales)} of the tensors are scales, all finite")
    if plan.vision:
        lines.append(f"{len(plan.vision)} of the vision tower and its projector left out: text alone is computed")
    if plan.ignored:
        more = ", ..." if len(plan.ignored) > 3 else ""
        lines.append(f"{len(plan.ignored)} ignored, of no use here: {', '.join(plan.ignored[:3])}{more}")
    return lines
