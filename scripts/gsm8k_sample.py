"""Complete the first questions of a GSM8K file in one call of `LLM.generate` and print what came out.

Example: `python scripts/gsm8k_sample.py --model DIR --questions gsm8k_test.jsonl --limit 64`.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minimax_jax import LLM, RequestOutput, SamplingParams
from minimax_jax.errors import MinimaxError, RequestError


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, or 2 for bad input, which is one line on stderr."""
    args = _parser().parse_args(argv)
    try:
        questions = read_questions(args.questions, args.limit)
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
        start = time.monotonic()
        llm = LLM(
            args.model,
            dtype=args.dtype,
            tensor_parallel_size=args.tensor_parallel_size,
            data_parallel_size=args.data_parallel_size,
            expert_parallel=args.expert_parallel,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
        )
        loaded = time.monotonic()
        outputs = llm.generate(questions, params)
        finished = time.monotonic()
        if args.output is not None:
            write_outputs(args.output, outputs)
    except (MinimaxError, OSError) as error:
        print(f"gsm8k_sample.py: error: {error}", file=sys.stderr)
        return 2
    print(f"loaded in {loaded - start:.1f} s")
    print(summary(outputs, finished - loaded))
    return 0


def read_questions(path: Path, limit: int) -> list[str]:
    """The `question` of each of the first `limit` lines.

    Raises:
      RequestError: a line that is not a JSON object with a question, or no line at all.
    """
    if limit < 1:
        raise RequestError(f"--limit is {limit}; expected at least 1")
    questions = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if len(questions) == limit:
                break
            try:
                questions.append(json.loads(line)["question"])
            except (ValueError, TypeError, KeyError):
                raise RequestError(f"{path} line {number}: expected a JSON object with a 'question'") from None
    if not questions:
        raise RequestError(f"{path} has no questions")
    return questions


def write_outputs(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """One JSON object a line; the file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for output in outputs:
            completion = output.outputs[0]
            record = {
                "prompt": output.prompt,
                "prompt_token_ids": list(output.prompt_token_ids),
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    partial.replace(path)


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Count, tokens, time and the share of each finish reason."""
    read = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(output.outputs[0].token_ids) for output in outputs)
    reasons = collections.Counter(str(output.outputs[0].finish_reason) for output in outputs)
    shares = ", ".join(f"{reason} {count / len(outputs):.0%}" for reason, count in reasons.most_common())
    return (
        f"{len(outputs)} questions, {read} prompt tokens, {new} new tokens in {seconds:.1f} s (compilation included), "
        f"{new / seconds:.1f} new tokens/s; finish reasons: {shares}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Complete the first questions of a GSM8K file.", allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR|REPO", help="checkpoint directory, or Hub owner/name")
    parser.add_argument("--questions", required=True, type=Path, metavar="FILE", help="JSONL with a 'question' a line")
    parser.add_argument("--limit", type=int, default=64, metavar="N", help="questions (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="new tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampling of each question")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="to compute in")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices to a model")
    parser.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="groups of such devices")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on devices")
    parser.add_argument("--max-model-len", type=int, default=1024, metavar="L", help="tokens (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=8, metavar="B", help="rows at once (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outputs here as JSONL")
    return parser


if __name__ == "__main__":
    sys.exit(main())
