"""Compiles the model's steps for AMD GPUs, without one, and checks what came out.

    make rocm-env
    .venv/bin/python scripts/check_rocm_codegen.py --target gfx942 --model-parallel 8

For each step, in a process of its own: the collectives are those that the design names, no weight or cache is copied,
and temporaries stay below twice the largest tensor of one layer and the rows that the experts write. Exits with 1 when
one of these does not hold. The model is MiniMax-M2 (--model M3: M3) at its published widths with --layers layers.
Nothing is run: this says nothing about numbers or speed.

With --kernels every kernel is compiled instead, at every shape of M2 and M3 on 1, 2, 4 and 8 devices, and its code is
read: no spilled register, matrix instructions, LDS and threads within the limits. A line each, and a table.

The plain XLA experts (--implementation xla) copy the weights of one expert at a time out of their stack, whatever way
they are written. That is reported as a note; --strict-experts makes it a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _rocm_kernels

ROOT = Path(__file__).resolve().parents[1]
TARGET_CONFIGS = {"gfx942": "mi300x.txtpb", "gfx950": "mi355x.txtpb"}
FORMATS = ("bfloat16", "float32", "fp8", "mxfp8", "mxfp4", "nvfp4")
PROGRAMS = ("decode", "prefill")
QUIET_CPU = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}  # the compiler warns that it cannot measure
FORWARDED = (
    *("model", "model_parallel", "experts", "format", "implementation", "layers", "max_num_seqs", "max_model_len"),
    *("config", "tools", "toolchain", "dump"),
)
M2 = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5e6,
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
M3 = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5e6,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk_blocks": 16,
    "index_block_size": 128,
}
M3_DENSE_LAYERS = 3


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when every check holds."""
    args = _parse(argv)
    if args.kernel_cases is not None:
        _rocm_kernels.compile_cases(args, sys.stdin.read())
        return 0
    if args.in_process:
        return _check_one(args)
    if not (args.toolchain / "plugin").is_dir():
        print(f"no AMD compiler in {args.toolchain}: run `make rocm-env`, or pass --toolchain", file=sys.stderr)
        return 2
    if args.kernels:
        return _rocm_kernels.run(args)
    failed = 0
    for target in args.target:
        for program in args.program:
            command = [sys.executable, __file__, *_flags(args, target, program), "--in-process"]
            result = subprocess.run(command, env=os.environ | QUIET_CPU, check=False)
            if result.returncode not in (0, 1):
                print(f"FAIL {target} {program}: the compiler ended with status {result.returncode}", flush=True)
            failed += result.returncode != 0
    return 1 if failed else 0


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compiled step holds, and the limits that it is held to."""

    collectives: dict[str, int]
    expected_collectives: dict[str, int]
    moves: list[str]
    expert_moves: list[str]  # of one expert's weights at a time
    temp_bytes: int
    largest_tensor_bytes: int
    row_bytes: int  # of the experts' output, one row for each token and chosen expert

    def violations(self) -> list[str]:
        """One line for each check that does not hold."""
        lines = [f"copies a weight or the cache: {move}" for move in self.moves]
        if self.collectives != self.expected_collectives:
            lines.append(f"collectives are {self.collectives}, expected {self.expected_collectives}")
        limit = 2 * (self.largest_tensor_bytes + self.row_bytes)
        if self.temp_bytes >= limit:
            lines.append(
                f"temporaries take {self.temp_bytes:,} bytes, the limit is twice the largest tensor of one layer "
                f"and the experts' rows: {limit:,}"
            )
        return lines


def _check_one(args: argparse.Namespace) -> int:
    from minimax_jax.config import Parallelism
    from minimax_jax.generation.programs import abstract_programs
    from minimax_jax.hlo import count_collectives, weight_sized_moves
    from minimax_jax.rocm_aot import compile_for_rocm, compile_only_devices
    from minimax_jax.sharding import make_mesh

    (target,), (program,) = args.target, args.program
    config = _config(args)
    parallelism = Parallelism(model=args.model_parallel, experts=args.experts)
    config.check_parallelism(parallelism)
    devices = compile_only_devices(
        args.toolchain, args.tools / "target_config" / TARGET_CONFIGS[target], parallelism.model
    )
    mesh = make_mesh(parallelism, devices)
    programs = abstract_programs(
        config,
        parallelism,
        mesh,
        weight_format=args.format,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        implementation=args.implementation,
    )
    jitted, arguments = programs[program]
    started = time.monotonic()
    compiled = compile_for_rocm(jitted, arguments)
    seconds = time.monotonic() - started
    text = compiled.as_text()
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)
        (args.dump / f"{target}-{program}-{args.format}-{args.experts}{args.model_parallel}.hlo.txt").write_text(text)

    sizes = _layer_bytes(arguments[0])
    experts = config.num_local_experts // (parallelism.model if args.experts == "expert" else 1)
    one_expert = max(size for path, size in sizes.items() if ".experts." in path) // experts
    moves, expert_moves = [], []
    for move in weight_sized_moves(text, min(sizes.values())):
        if move.source.startswith(("weights", "cache")):
            small = ".experts." in move.source and move.bytes <= one_expert and not args.strict_experts
            (expert_moves if small else moves).append(str(move))
    report = Report(
        collectives=count_collectives(text),
        expected_collectives=_expected_collectives(parallelism.model, args.layers, 2 if args.model == "M3" else 3),
        moves=moves,
        expert_moves=expert_moves,
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        largest_tensor_bytes=max(sizes.values()),
        row_bytes=math.prod(arguments[2].shape if program == "prefill" else (args.max_num_seqs,))
        * config.num_experts_per_tok
        * config.hidden_size
        * 4,
    )
    lines = report.violations()
    print(
        f"{'FAIL' if lines else 'ok'} {target} {args.model} {program} {args.format} model {parallelism.model} "
        f"experts by {args.experts}, {args.layers} layers: "
        f"{seconds:.0f} s, collectives {report.collectives}, {len(report.moves)} copies, "
        f"arguments {compiled.memory_analysis().argument_size_in_bytes:,} bytes, "
        f"temporaries {report.temp_bytes:,} bytes, largest tensor of a layer {report.largest_tensor_bytes:,} bytes"
    )
    for line in lines:
        print(f"  {line}")
    for move_line in report.expert_moves:
        print(f"  note: one expert at a time, {move_line}")
    sys.stdout.flush()
    return 1 if lines else 0


def _layer_bytes(weights: dict[str, Any]) -> dict[str, int]:
    """Bytes that one device holds of each matrix of each layer, packed ones as they are packed."""
    sizes = {}
    for path, weight in weights.items():
        payload = getattr(weight, "payload", weight)
        if path.startswith("layers.") and payload.ndim >= 2 and ".gate." not in path:
            sizes[path] = math.prod(payload.sharding.shard_shape(payload.shape)) * payload.dtype.itemsize
    return sizes


def _config(args: argparse.Namespace) -> Any:
    """The published widths, --layers deep; of M3 the first layers are dense, as far as there are others."""
    from minimax_jax.config import MiniMaxM2Config, MiniMaxM3Config

    depth, given = {"num_hidden_layers": args.layers}, json.loads(args.config)
    if args.model == "M2":
        return MiniMaxM2Config(**M2 | depth | given)
    dense = min(M3_DENSE_LAYERS, args.layers - 1)
    kinds = {
        "mlp_layer_types": ("dense",) * dense + ("sparse",) * (args.layers - dense),
        "layer_types": ("full_attention",) * dense + ("minimax_m3_sparse",) * (args.layers - dense),
    }
    return MiniMaxM3Config(**M3 | depth | kinds | given)


def _expected_collectives(model: int, layers: int, each: int) -> dict[str, int]:
    """One all-reduce for the embedding, `each` a layer (o_proj, experts, M2 qk-norm sums), one all-gather of logits."""
    return {} if model == 1 else {"all-reduce": 1 + each * layers, "all-gather": 1}


def _flags(args: argparse.Namespace, target: str, program: str) -> list[str]:
    """The same options for one target and one program."""
    flags = ["--target", target, "--program", program]
    for name in FORWARDED:
        value = getattr(args, name)
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags + ["--strict-experts"] * args.strict_experts


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", nargs="+", choices=sorted(TARGET_CONFIGS), default=["gfx942"])
    add("--model", choices=("M2", "M3"), default="M2")
    add("--program", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    add("--model-parallel", type=int, default=8, metavar="N", help="devices that share the model")
    add("--experts", choices=("tensor", "expert"), default="tensor", help="experts split by width, or spread whole")
    add("--format", choices=FORMATS, default="bfloat16", help="of the weights")
    add("--implementation", choices=("pallas", "xla"), help="default: what a GPU gets, the kernels")
    add("--layers", type=int, default=2)
    add("--max-num-seqs", type=int, default=8, metavar="B")
    add("--max-model-len", type=int, default=4096, metavar="TOKENS")
    add("--config", default="{}", metavar="JSON", help="config fields other than the published ones")
    add("--tools", type=Path, default=ROOT.parent / "shared" / "tools" / "rocm_codegen", help="holds target_config/")
    add(
        "--toolchain",
        type=Path,
        default=os.environ.get("MINIMAX_ROCM", ROOT / ".venv" / "rocm"),
        help="what `make rocm-env` made",
    )
    add("--strict-experts", action="store_true", help="a copy of one expert's weights is a failure too")
    add("--dump", type=Path, metavar="DIR", help="keep the compiled HLO there")
    add("--kernels", action="store_true", help="compile every kernel at every shape in place of the model's steps")
    add("--only", default="", metavar="REGEX", help="kernel cases whose line matches")
    add("--jobs", type=int, default=os.cpu_count(), help="processes that compile kernels at the same time")
    add("--kernel-cases", help=argparse.SUPPRESS)
    add("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.toolchain = Path(args.toolchain)
    return args


if __name__ == "__main__":
    sys.exit(main())
