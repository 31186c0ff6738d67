"""`minimax-jax quantize`: a BF16, F16, F32 or FP8 checkpoint into a packed format, a part of a tensor at a time."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from minimax_jax.checkpoint.quantizers import decode_e4m3
from minimax_jax.checkpoint.recipes import (
    BLOCK_COLUMNS,
    PACKED_FORMATS,
    PackedFormat,
    declare,
    is_linear,
    is_packed,
    pack,
    packed_layout,
)
from minimax_jax.checkpoint.safetensors_index import (
    DTYPES,
    INDEX_NAME,
    Checkpoint,
    TensorInfo,
    name_some,
    open_checkpoint,
)
from minimax_jax.checkpoint.shard_writer import Layout, ShardWriter, layout_bytes
from minimax_jax.config_keys import read_json_object, show
from minimax_jax.destination import Destination, write_json
from minimax_jax.errors import CheckpointError, ConfigError
from minimax_jax.progress import Progress
from minimax_jax.quantization.modules import ModuleSet, compile_entry, is_pattern

PLAIN = ("BF16", "F16", "F32")

_PART = 2**22  # elements that a thread works on at a time: 16 MB of float32, with its intermediates about 100 MB
_THREADS = 8
_ROWS = 128  # parts are whole blocks of rows
_SCALE_INV = "_scale_inv"
_OF_PACKED = ("weight_scale", "weight_packed", "weight_global_scale", "qweight", "input_scale", "input_global_scale")
_MODEL_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_CONFIGS = ("config.json", "hf_quant_config.json")  # written anew, and ModelOpt's words on the source's formats


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What was written.

    Attributes:
      directory: the new checkpoint.
      packed: how many weights were packed.
      kept: how many tensors were not.
      source_bytes: of the source's tensors.
      bytes: of the new tensors.
    """

    directory: Path
    packed: int
    kept: int
    source_bytes: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class _Job:
    """One tensor of the source, its FP8 scales with it.

    Attributes:
      info: the tensor.
      scale: the multipliers of an FP8 one.
      block: (rows, cols) that share one of them.
      layout: the tensors that it becomes.
      packed: it is quantised; otherwise copied, or decoded if it is FP8.
    """

    info: TensorInfo
    layout: Layout
    packed: bool
    scale: TensorInfo | None = None
    block: tuple[int, int] = (1, 1)


def quantize_checkpoint(
    source: Path | str, destination: Path | str, weight_format: PackedFormat, *, exclude: Sequence[str] = ()
) -> Quantized:
    """Writes the checkpoint `source` with its weights packed as `weight_format`; shards keep their names.

    MXFP4 and NVFP4 pack the experts, MXFP8 and FP8 also attention and dense layers; router, embedding, head, norms and
    vision never. What is FP8 in the source and not packed here becomes the config's dtype. Memory does not grow with
    the model. `destination` appears complete or not at all.

    Args:
      source: directory of safetensors files; BF16, F16, F32, or FP8 with block scales.
      destination: must not exist, or be empty.
      weight_format: of the packed weights.
      exclude: more modules to leave alone: names, globs, or `re:` and a regular expression.

    Raises:
      ConfigError: a format or pattern that cannot be used.
      CheckpointError: the source is damaged, or quantised in another way, or `destination` cannot be written.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    if weight_format not in PACKED_FORMATS:
        raise ConfigError(f"format is {weight_format!r}; expected one of {', '.join(PACKED_FORMATS)}")
    excluded = _patterns(exclude)
    with open_checkpoint(source) as checkpoint:
        config = read_json_object(source / "config.json")
        jobs = _plan(checkpoint, config, weight_format, excluded)
        others = _find_others(source)
        size = sum(layout_bytes(job.layout) for job in jobs)
        try:
            with Destination(destination) as partial:
                if size > (free := shutil.disk_usage(partial).free):
                    raise CheckpointError(
                        f"{destination} needs {size / 1e6:,.0f} MB, but its disk has {free / 1e6:,.0f} MB free"
                    )
                _write(checkpoint, jobs, partial, weight_format, destination)
                for path in others:
                    (partial / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / path, partial / path)
                linear = [job for job in jobs if is_linear(job.info.name, job.info.shape)]
                plain = [_module(job.info.name) for job in linear if not job.packed]
                _write_config(partial, config, declare(weight_format, plain))
                _write_index(partial, jobs, size)
        except OSError as error:
            raise CheckpointError(f"cannot write {destination}: {error.strerror or error}") from error
    packed = sum(job.packed for job in jobs)
    source_bytes = sum(info.nbytes for info in checkpoint.tensors.values())
    return Quantized(destination, packed, len(jobs) - packed, source_bytes, size)


# ---- what becomes of each tensor


def _patterns(exclude: Sequence[str]) -> dict[str, ModuleSet]:
    for pattern in exclude:
        if is_pattern(pattern):
            try:
                compile_entry(pattern)
            except ValueError as error:
                raise ConfigError(f"--exclude {pattern!r} {error}") from None
    return {pattern: ModuleSet((pattern,)) for pattern in exclude}


def _plan(
    checkpoint: Checkpoint, config: Mapping[str, Any], weight_format: PackedFormat, excluded: Mapping[str, ModuleSet]
) -> list[_Job]:
    """Jobs in the order of the source's shards; proves that every tensor is understood before any is read."""
    sections = [section for section in (config, config.get("text_config")) if isinstance(section, dict)]
    declared: Any = next((found for section in sections if (found := section.get("quantization_config"))), {})
    if not isinstance(declared, dict):
        where = checkpoint.directory / "config.json"
        raise ConfigError(f"{where}: quantization_config {show(declared)} is not an object")
    method = declared.get("quant_method")
    if declared and method != "fp8":
        raise CheckpointError(
            f"{checkpoint.directory} is quantized already (quant_method {method!r}); "
            "start from a BF16, F16, F32 or FP8 checkpoint"
        )
    widened = _model_dtype(sections)
    block = _block(declared.get("weight_block_size"))
    jobs = []
    unused = dict(excluded)
    for info in checkpoint.tensors.values():
        owner = info.name.removesuffix(_SCALE_INV)
        if owner != info.name and owner in checkpoint.tensors:
            if checkpoint.tensors[owner].dtype != "F8_E4M3":
                raise CheckpointError(f"{info} scales {checkpoint.tensors[owner]}, expected F8_E4M3 there")
            continue
        if _is_fp8_input_scale(checkpoint, info):
            continue  # the formats that are written quantise inputs in other ways
        scale = _check_source(checkpoint, info)
        if scale is not None and weight_format == "fp8":
            raise CheckpointError(f"{info} is FP8 already; choose another format than fp8")
        module = _module(info.name)
        matching = [pattern for pattern, modules in excluded.items() if modules.find(module) is not None]
        for pattern in matching:
            unused.pop(pattern, None)
        packed = is_linear(info.name, info.shape) and is_packed(module, weight_format) and not matching
        layout: Layout
        if packed:
            layout = packed_layout(info.name, _check_matrix(info, weight_format), weight_format)
        else:
            layout = {info.name: (info.dtype if scale is None else widened, info.shape)}
        shared = (1, 1) if scale is None else _scale_block(info, scale, block)
        jobs.append(_Job(info, layout, packed, scale, shared))
    if unused:
        raise ConfigError(f"--exclude {next(iter(unused))!r} names no module of {checkpoint.directory}")
    if not any(job.packed for job in jobs):
        linear = [_module(job.info.name) for job in jobs if is_linear(job.info.name, job.info.shape)]
        raise CheckpointError(
            f"{checkpoint.directory} has no weight that {weight_format} would pack; its linear layers are "
            f"{name_some(linear) or 'none'}"
        )
    return jobs


def _is_fp8_input_scale(checkpoint: Checkpoint, info: TensorInfo) -> bool:
    """Whether `info` is the static scale of an FP8 layer's input."""
    module, _, parameter = info.name.rpartition(".")
    weight = checkpoint.tensors.get(f"{module}.weight")
    return parameter == "input_scale" and weight is not None and weight.dtype == "F8_E4M3"


def _check_source(checkpoint: Checkpoint, info: TensorInfo) -> TensorInfo | None:
    """The scales of an FP8 tensor, None for a plain one."""
    scale = checkpoint.tensors.get(info.name + _SCALE_INV)
    if info.dtype == "F8_E4M3" and len(info.shape) == 2 and scale is not None and scale.dtype in PLAIN:
        return scale
    parameter = info.name.rpartition(".")[2]
    packed = info.dtype.startswith("F8_") or info.dtype in ("U8", "I8")
    if packed or parameter.startswith(_OF_PACKED):
        raise CheckpointError(
            f"{info} is of a weight that is quantized already; expected {', '.join(PLAIN)}, or F8_E4M3 with a "
            f"floating-point 'weight{_SCALE_INV}'"
        )
    return None


def _check_matrix(info: TensorInfo, weight_format: PackedFormat) -> tuple[int, int]:
    columns = BLOCK_COLUMNS[weight_format]
    if info.dtype not in (*PLAIN, "F8_E4M3") or len(info.shape) != 2 or info.shape[1] % columns:
        raise CheckpointError(
            f"{info} cannot be packed as {weight_format}, which takes a floating-point matrix whose columns are a "
            f"multiple of {columns}; leave it alone with --exclude '{_module(info.name)}'"
        )
    return info.shape[0], info.shape[1]


def _scale_block(info: TensorInfo, scale: TensorInfo, declared: tuple[int, int]) -> tuple[int, int]:
    """Which (rows, cols) of an FP8 weight share one of its scales."""
    rows, cols = info.shape
    if scale.shape in ((), (1,), (1, 1)):
        return rows, cols
    if scale.shape in ((rows,), (rows, 1)):
        return 1, cols
    grid = (-(-rows // declared[0]), -(-cols // declared[1]))
    if scale.shape != grid:
        raise CheckpointError(
            f"{scale} does not fit {info}: expected [], [1], [{rows}, 1] or {list(grid)}, one scale for each block of "
            f"weight_block_size {list(declared)}"
        )
    return declared


def _block(declared: Any) -> tuple[int, int]:
    match declared:
        case None:
            return 128, 128
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            return rows, cols
    raise ConfigError(f"config.json's weight_block_size is {declared!r}; expected two numbers above 0")


def _model_dtype(sections: Sequence[Mapping[str, Any]]) -> str:
    """What an FP8 weight becomes where it is not packed again."""
    for section in reversed(sections):
        for key in ("dtype", "torch_dtype"):
            found = section.get(key)
            if isinstance(found, str) and found in _MODEL_DTYPES:
                return _MODEL_DTYPES[found]
    return "BF16"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


# ---- reading and writing


def _write(
    checkpoint: Checkpoint, jobs: Sequence[_Job], directory: Path, weight_format: PackedFormat, destination: Path
) -> None:
    """All shards, the tensors of one by several threads."""
    files: dict[str, list[_Job]] = {}
    for job in jobs:
        files.setdefault(job.info.file, []).append(job)
    total = sum(_bytes(job) for job in jobs)
    with (
        Progress(f"quantizing to {destination.name}", total, "B", f"shards 0/{len(files)}") as progress,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool,
    ):
        for done, (file, group) in enumerate(files.items(), start=1):
            layout = {name: entry for job in group for name, entry in job.layout.items()}
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            with ShardWriter(directory / file, layout) as writer:
                pending = {pool.submit(_write_job, checkpoint, job, writer, weight_format): job for job in group}
                try:
                    for future in as_completed(pending):
                        future.result()
                        progress.add(_bytes(pending[future]))
                except BaseException:
                    pool.shutdown(cancel_futures=True)  # before the file is closed
                    raise
            progress.set_note(f"shards {done}/{len(files)}")
            checkpoint.close()


def _bytes(job: _Job) -> int:
    """Of the source."""
    return job.info.nbytes + (job.scale.nbytes if job.scale is not None else 0)


def _write_job(checkpoint: Checkpoint, job: _Job, writer: ShardWriter, weight_format: PackedFormat) -> None:
    name = job.info.name
    if not job.packed and job.scale is None:
        _copy_tensor(checkpoint, job.info, writer)
        return
    if not job.packed:
        dtype = DTYPES[job.layout[name][0]]
        for first, rows in _parts(checkpoint, job):
            writer.write(name, rows.astype(dtype), first)
        return
    largest = None
    if weight_format == "nvfp4":  # its global scale comes before its first code
        largest = max((float(np.abs(rows).max(initial=0)) for _, rows in _parts(checkpoint, job)), default=0.0)
    height = job.info.shape[0]
    for first, rows in _parts(checkpoint, job):
        for part, values in pack(name, rows, weight_format, largest).items():
            shape = job.layout[part][1]
            block = -(-height // shape[0]) if shape else 1  # rows of the weight to one of this tensor
            writer.write(part, values, first // block if shape else 0)


def _parts(checkpoint: Checkpoint, job: _Job) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, float32 rows) of a matrix, its scales applied."""
    info, scale = job.info, _read_scale(checkpoint, job)
    height, width = info.shape
    step = max(_PART // max(width, 1) // _ROWS, 1) * _ROWS
    for first in range(0, height, step):
        stop = min(first + step, height)
        stored = np.empty((stop - first, width), info.numpy_dtype)
        checkpoint.copy(info, info.shape, (slice(first, stop),), stored)
        if scale is None:
            rows = stored.astype(np.float32)
        else:
            # Scales of a block's row for each row, then of a block's column for each column.
            wide = scale[np.arange(first, stop) // job.block[0]].repeat(job.block[1], axis=1)[:, :width]
            rows = decode_e4m3(stored) * wide
        if not np.isfinite(rows).all():
            row, col = np.argwhere(~np.isfinite(rows))[0]
            raise CheckpointError(f"{info} is not finite at [{first + row}, {col}]; it cannot be quantized")
        yield first, rows


def _read_scale(checkpoint: Checkpoint, job: _Job) -> np.ndarray | None:
    """The scales of an FP8 weight as a float32 grid."""
    if job.scale is None:
        return None
    scale = checkpoint.read(job.scale.name).astype(np.float32)
    if not (np.isfinite(scale) & (scale >= 0)).all():
        raise CheckpointError(f"{job.scale} has a scale that is negative or not finite")
    rows, cols = job.info.shape
    return scale.reshape(-(-rows // job.block[0]), -(-cols // job.block[1]))


def _copy_tensor(checkpoint: Checkpoint, info: TensorInfo, writer: ShardWriter) -> None:
    """Byte for byte."""
    row = math.prod(info.shape[1:])
    step = max(_PART // max(row, 1), 1)
    if not info.shape:
        writer.write(info.name, checkpoint.read(info.name))
        return
    for first in range(0, info.shape[0], step):
        part = np.empty((min(step, info.shape[0] - first), *info.shape[1:]), info.numpy_dtype)
        checkpoint.copy(info, info.shape, (slice(first, first + len(part)),), part)
        writer.write(info.name, part, first)


# ---- the files beside the weights


def _find_others(source: Path) -> list[Path]:
    """Tokenizer, chat template, generation config and the like, inside `source`; neither weights nor hidden files.

    Raises:
      CheckpointError: one that cannot be copied, which is better said before the weights are written.
    """
    found = []
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.startswith(".") or name.endswith(_WEIGHT_FILES) or name in _CONFIGS:
                continue
            path = Path(folder) / name
            if not path.is_file():
                raise CheckpointError(f"{path} is a link to nothing, or no file; fetch it again or remove it")
            found.append(path.relative_to(source))
    return found


def _write_config(directory: Path, config: Mapping[str, Any], quantization: dict[str, Any]) -> None:
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    text = written.get("text_config")
    if isinstance(text, dict):
        written["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    write_json(directory / "config.json", written | {"quantization_config": quantization})


def _write_index(directory: Path, jobs: Sequence[_Job], size: int) -> None:
    weight_map = {name: job.info.file for job in jobs for name in job.layout}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_NAME, index)
