"""The `minimax-jax` command: generate, inspect, quantize, make-tiny. JAX is imported only by what needs it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import minimax_jax
from minimax_jax.errors import ConfigError, MinimaxError, RequestError
from pallas_kernels.errors import Unavailable

if TYPE_CHECKING:
    from minimax_jax.llm import LLM
    from minimax_jax.outputs import CompletionOutput, RequestOutput, SamplingParams

PROG = "minimax-jax"
BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

logger = logging.getLogger("minimax_jax")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 for bad input, which is one line on stderr."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # --help, or bad arguments
        return int(stop.code or 0)
    commands = {"generate": _generate, "inspect": _inspect, "quantize": _quantize, "make-tiny": _make_tiny}
    command = commands[args.command]
    with _log_lines():
        try:
            command(args)
            sys.stdout.flush()
        except (MinimaxError, Unavailable) as error:
            return _fail(str(error))
        except BrokenPipeError:
            # Whoever read our output has seen enough; nothing may be written at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except OSError as error:
            return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0


def _generate(args: argparse.Namespace) -> None:
    prompts = _read_prompts(args)
    given = {
        name: value
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "ignore_eos")
        if (value := getattr(args, name)) is not None
    }
    minimax_jax.SamplingParams(**given)  # refuses bad values before anything is loaded
    if args.max_num_seqs is None:  # as few rows as will do: each has room in the cache for a whole context
        args.max_num_seqs = -(-min(len(prompts), 8) // args.data_parallel_size) * args.data_parallel_size

    from minimax_jax.hub import resolve_model

    directory = resolve_model(args.model, args.revision)
    prompt_ids = _encode_prompts(prompts, directory, args.max_model_len)
    llm = minimax_jax.LLM(
        directory,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        expert_parallel=args.expert_parallel,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_cache_dtype=args.kv_cache_dtype,
        emulate_activation_quant=args.emulate_activation_quant,
        implementation=args.implementation,
    )
    params = dataclasses.replace(llm.get_default_sampling_params(), **given)
    start = time.monotonic()
    if len(prompt_ids) == 1 and not args.no_stream:
        outputs = [_write_stream(llm, prompt_ids[0], params)]
    else:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], params)
        for i, output in enumerate(outputs):
            if len(outputs) > 1:
                _write(f"==> prompt {i + 1} of {len(outputs)} <==\n")
            _write_whole(output)
    seconds = time.monotonic() - start
    for output in outputs:
        completion = output.outputs[0]
        logger.info(
            "%d prompt tokens, %d new tokens, finish_reason %s",
            len(output.prompt_token_ids), len(completion.token_ids), completion.finish_reason,
        )  # fmt: skip
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    logger.info("%d tokens in %.2f s, compilation included", count, seconds)


def _inspect(args: argparse.Namespace) -> None:
    from minimax_jax.config import Parallelism
    from minimax_jax.inspection import describe_checkpoint

    parallelism = Parallelism(
        data=args.data_parallel_size,
        model=args.tensor_parallel_size,
        experts="expert" if args.expert_parallel else "tensor",
    )
    lines = describe_checkpoint(
        Path(args.directory),
        parallelism,
        max_model_len=args.max_model_len,
        max_num_seqs=8 if args.max_num_seqs is None else args.max_num_seqs,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    for line in lines:
        _write(line + "\n")


def _quantize(args: argparse.Namespace) -> None:
    from minimax_jax.quantize import quantize_checkpoint

    if not args.destination:
        raise ConfigError("the destination's name is empty; name one that does not exist or is empty")
    done = quantize_checkpoint(args.source, args.destination, args.format, exclude=args.exclude)
    logger.info(
        "wrote %s: %d weights as %s, %d tensors as they were; %.2f GB from %.2f GB",
        done.directory, done.packed, args.format, done.kept, done.bytes / 1e9, done.source_bytes / 1e9,
    )  # fmt: skip


def _make_tiny(args: argparse.Namespace) -> None:
    from minimax_jax.tiny import TinyShape, make_tiny

    if not args.directory:
        raise ConfigError("the directory's name is empty; name one that does not exist or is empty")
    shape = TinyShape(num_hidden_layers=args.layers)
    directory = make_tiny(args.directory, seed=args.seed, weight_format=args.format, shape=shape)
    logger.info("wrote %s: %d layers, %s, untrained; seed %d", directory, args.layers, args.format, args.seed)


def _read_prompts(args: argparse.Namespace) -> list[str | list[int]]:
    """The prompts of exactly one source: arguments, a file, ids, or stdin when there is none of these."""
    sources = {
        "prompt arguments": bool(args.prompt),
        "--prompt-file": args.prompt_file is not None,
        "--prompt-ids": args.prompt_ids is not None,
    }
    named = [source for source, is_given in sources.items() if is_given]
    if len(named) > 1:
        raise RequestError(f"prompts are given by {' and by '.join(named)}; use one of them")
    prompts: list[str | list[int]]
    if args.prompt_ids is not None:
        prompts = [_parse_ids(args.prompt_ids)]
    elif args.prompt_file is not None:
        prompts = [_read_stdin() if args.prompt_file == "-" else _read_file(Path(args.prompt_file))]
    else:
        prompts = [_read_stdin() if prompt == "-" else prompt for prompt in args.prompt or ["-"]]
    for i, prompt in enumerate(prompts):
        if not prompt:
            which = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
            raise RequestError(f"{which} is empty; it needs at least one token")
    return prompts


def _read_file(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"prompt file '{path}' cannot be read: {error.strerror}") from None
    return _text(data, f"prompt file '{path}'")


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError("no prompt: give it as an argument, with --prompt-file, or on stdin")
    if sys.stdin.isatty():
        logger.info("reading the prompt from the terminal; end it with Ctrl-D")
    return _text(sys.stdin.buffer.read(), "the prompt on stdin")


def _text(data: bytes, name: str) -> str:
    """UTF-8 without the last line end, which editors and `echo` add."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 20):
            raise RequestError(f"--prompt-ids has {word!r}; expected token ids such as 1,2,3")
    return [int(word) for word in words]


def _encode_prompts(prompts: Sequence[str | list[int]], directory: Path, max_model_len: int | None) -> list[list[int]]:
    """Ids of the prompts, checked against vocabulary and context before weights are loaded."""
    from minimax_jax.config import load_config
    from minimax_jax.requests import check_prompt
    from minimax_jax.text.tokenizer import check_vocabulary, load_tokenizer

    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError(f"{directory} has no tokenizer, so a text prompt cannot be read; use --prompt-ids")
            prompt = tokenizer.encode(prompt)
        check_prompt(prompt, config.vocab_size, max_model_len or config.max_position_embeddings, new_tokens=1)
        encoded.append(prompt)
    return encoded


def _write_stream(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
    """Writes what is new of each growing output."""
    output, written = None, ""
    for output in llm.stream({"prompt_token_ids": prompt_ids}, params):
        shown = _shown(output.outputs[0])
        _write(shown[len(written) :])
        written = shown
    if output is None:
        raise AssertionError("the stream ended without an output")
    _end(output.outputs[0], written)
    return output


def _write_whole(output: RequestOutput) -> None:
    completion = output.outputs[0]
    shown = _shown(completion)
    _write(shown)
    _end(completion, shown)


def _shown(completion: CompletionOutput) -> str:
    """The text, or the ids where there is no tokenizer."""
    return ",".join(map(str, completion.token_ids)) if completion.text is None else completion.text


def _end(completion: CompletionOutput, shown: str) -> None:
    """The line end, and the table of log probabilities where they were asked for."""
    if not shown.endswith("\n"):
        _write("\n")
    if completion.logprobs is None:
        return
    _write("step\tid\tlogprob\trank\ttoken\n")  # the chosen token of a step first
    for step, entries in enumerate(completion.logprobs):
        for id_, entry in entries.items():
            token = "" if entry.decoded_token is None else repr(entry.decoded_token)
            _write(f"{step}\t{id_}\t{entry.logprob:.4f}\t{entry.rank}\t{token}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _fail(message: str) -> int:
    sys.stderr.write(f"{PROG}: error: {' '.join(message.splitlines())}\n")
    return BAD_INPUT


@contextlib.contextmanager
def _log_lines() -> Iterator[None]:
    """This package's log as plain lines on stderr while a command runs."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for bad arguments."""

    def error(self, message: str) -> NoReturn:
        _fail(f"{message} (see {self.prog} --help)")
        raise SystemExit(BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description="MiniMax-M2 inference in JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROG} {minimax_jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_inspect(commands)
    _add_quantize(commands)
    _add_make_tiny(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="complete prompts",
        description="Complete prompts. One prompt is streamed; the log goes to stderr.",
        epilog="Sampling values that are not given come from the checkpoint's generation_config.json.",
    )
    parser.add_argument("prompt", nargs="*", help="one prompt each; '-' or none reads one from stdin")
    parser.add_argument("--prompt-file", metavar="FILE", help="the whole file is the prompt (but its last line end)")
    parser.add_argument("--prompt-ids", metavar="1,2,3", help="one prompt as token ids")
    parser.add_argument("--model", required=True, metavar="DIR|REPO", help="checkpoint directory, or Hub owner/name")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="likeliest tokens up to this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="that many likeliest tokens; 0 or -1: all")
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampling of each prompt")
    parser.add_argument("--logprobs", type=int, metavar="N", help="also a table of log probabilities, N a step")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--no-stream", action="store_true", help="write the text when it is complete")
    parser.add_argument(
        "--implementation",
        choices=("pallas", "xla", "reference"),
        help="of experts, packed layers and attention (default: Pallas kernels for packed weights on a GPU, else XLA)",
    )
    parser.add_argument(
        "--emulate-activation-quant",
        action="store_true",
        help="quantise and dequantise the inputs of packed layers as the checkpoint declares (default: keep them)",
    )
    _add_placement(parser)
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="B", help="sequences at a time (default: the number of prompts, at most 8)"
    )


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="what is in a checkpoint",
        description="Show model, formats, sizes and coverage of a checkpoint, and the memory plan for a mesh. Needs no "
        "accelerator and reads no weight.",
    )
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory")
    _add_placement(parser)
    parser.add_argument("--max-num-seqs", type=_positive, metavar="B", help="sequences at a time (default: 8)")


def _add_quantize(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        allow_abbrev=False,
        help="a checkpoint with packed weights",
        description="Write a BF16, F16, F32 or FP8 checkpoint again with its weights packed. mxfp4 and nvfp4 pack the "
        "experts, in the layout of AMD Quark; mxfp8 and fp8 also attention and dense layers, in the model vendor's. "
        "Needs no accelerator, and little memory whatever the model's size.",
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint directory")
    parser.add_argument("destination", metavar="DST", help="must not exist, or be empty")
    parser.add_argument("--format", choices=("mxfp4", "nvfp4", "mxfp8", "fp8"), required=True, help="of the weights")
    parser.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="more modules to leave as they are: a name, a glob, or re: and a regular expression",
    )


def _add_make_tiny(commands: Any) -> None:
    parser = commands.add_parser(
        "make-tiny",
        allow_abbrev=False,
        help="a small untrained checkpoint",
        description="Write a small untrained checkpoint in the published layout, with a tokenizer and a chat template.",
    )
    parser.add_argument("directory", metavar="DIR", help="must not exist, or be empty")
    formats = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "float32")
    parser.add_argument("--format", choices=formats, default="bf16", help="of the weights (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="number of layers (default: %(default)s)")


def _add_placement(parser: argparse.ArgumentParser) -> None:
    """How a model is placed and computed; the same words for `generate` and `inspect`."""
    dtypes = ("auto", "bfloat16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="to compute in (default: the config's)")
    parser.add_argument("--kv-cache-dtype", choices=dtypes, default="auto", help="(default: the compute dtype)")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1, metavar="N", help="devices to a model")
    parser.add_argument("--data-parallel-size", type=_positive, default=1, metavar="N", help="groups of such devices")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on devices, not split by width")
    parser.add_argument("--max-model-len", type=_positive, metavar="L", help="tokens (default: the config's maximum)")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 to 999999999")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
