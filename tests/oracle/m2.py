"""The live oracle: transformers' MiniMaxM2ForCausalLM in torch, float32, eager, no cache. Free of minimax_jax."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from tests.packed import decode_all, read_checkpoint

LOGITS_STD = 2.5
FP8_MAX = 448.0
LEAST_MARGIN = 1e-5  # below this, two implementations may choose different experts
MOST_LEFT_OUT = 0.05
PUBLISHED_EXTRAS = {
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
    "mtp_transformer_layers": 1,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "transformers_version": "4.46.1",
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
ONLY_TRANSFORMERS = (
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "output_router_logits",
    "pad_token_id", "rope_parameters", "router_aux_loss_coef", "router_jitter_noise",
)  # fmt: skip

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


# ---- models and checkpoints


def random_model(seed: int, *, dtype: torch.dtype = torch.bfloat16, **config: Any) -> MiniMaxM2ForCausalLM:
    """A model in float32 none of whose weights could be left out or taken for another unseen.

    Norms are away from one, the routing bias is not zero, w1 and w3 have levels of their own in every expert, and
    matrices differ in level from one group of 32 rows or columns to the next, so that blocks get unlike scales. Every
    weight but the router's is a value of `dtype`; the router's are float32 values that bfloat16 cannot hold.
    """
    defaults = {"bos_token_id": None, "eos_token_id": None}
    model = MiniMaxM2ForCausalLM(_eager(MiniMaxM2Config(**(defaults | config)))).eval()
    rng = np.random.default_rng(seed)
    state = {name: _draw(rng, name, tuple(value.shape)) for name, value in sorted(model.state_dict().items())}
    for name, value in state.items():
        if not _is_router(name):
            state[name] = value.to(dtype).float()
    model.load_state_dict(state)
    return model


def save(
    model: MiniMaxM2ForCausalLM,
    directory: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "50GB",
    spelling: str = "transformers",
) -> Path:
    """Write a checkpoint through `save_pretrained`; the router stays float32.

    Args:
      model: whose weights `dtype` can hold.
      directory: gets one file, or several and an index if `max_shard_size` asks for that.
      dtype: of all but the router.
      max_shard_size: as in `save_pretrained`.
      spelling: of config.json; "transformers" leaves it as written, see `respell`.
    """
    stored = copy.deepcopy(model).to(dtype)
    weights, written = model.state_dict(), stored.state_dict()
    for name, value in weights.items():
        if _is_router(name):
            owner, _, attribute = name.rpartition(".")
            held = getattr(stored.get_submodule(owner), attribute)
            held.data = value.clone()
        elif not torch.equal(written[name].float(), value):
            raise ValueError(f"{name} has values that {dtype} cannot hold; give random_model the same dtype")
    stored.save_pretrained(directory, max_shard_size=max_shard_size)
    respell(directory, spelling)
    return directory


def respell(directory: Path, spelling: str) -> None:
    """Rewrite config.json: "published" as the vendor spells it, "mixed" with both spellings of what has two."""
    if spelling == "transformers":
        return
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config["rope_parameters"]
    factor = rope.get("partial_rotary_factor", 1.0)
    config |= {"rope_theta": rope["rope_theta"], "rotary_dim": int(config["head_dim"] * factor)}
    if spelling == "published":
        for key in ONLY_TRANSFORMERS:
            config.pop(key, None)
        config |= PUBLISHED_EXTRAS | {"attn_type_list": [1] * config["num_hidden_layers"]}
    elif spelling == "mixed":
        config |= {"partial_rotary_factor": factor, "torch_dtype": config["dtype"]}
        config["num_experts"] = config["num_local_experts"]
    else:
        raise ValueError(f"spelling {spelling!r}")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def quantize_fp8(source: Path, destination: Path, block: tuple[int, int] = (128, 128)) -> Path:
    """Rewrite a plain checkpoint in the vendor's FP8 layout: its packed tensors, file names and `quantization_config`.

    The last block of a row or column may be ragged. What is not packed keeps its dtype.
    """
    destination.mkdir(parents=True)
    files = sorted(source.glob("*.safetensors"))
    weight_map, total = {}, 0
    for i, file in enumerate(files):
        tensors = {}
        for name, weight in load_file(file).items():
            if _is_packed(name):
                tensors[name], tensors[f"{name}_scale_inv"] = _fp8_blocks(weight.float(), block)
            else:
                tensors[name] = weight
        written = f"model-{i:05d}-of-{len(files):05d}.safetensors"  # from 0, as published
        save_file(tensors, destination / written, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, written)
        total += sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for file in source.iterdir():
        if file.name != "config.json" and not file.name.startswith("model"):
            shutil.copy(file, destination)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return destination


def dequantized_model(directory: Path) -> MiniMaxM2ForCausalLM:
    """A plain or packed checkpoint in float32: its bytes are decoded here, only the arithmetic is transformers'."""
    config = _eager(MiniMaxM2Config.from_pretrained(directory))
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        del config.quantization_config
    rows, columns = (quantization or {}).get("weight_block_size") or (128, 128)
    tensors = decode_all(read_checkpoint(directory), (rows, columns))
    model = MiniMaxM2ForCausalLM(config).eval()
    state = {}
    for name in model.state_dict():
        published = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith((".gate_up_proj", ".down_proj")):
            prefix = published.rpartition(".")[0]
            parts = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
            value = np.stack(
                [
                    np.concatenate([tensors.pop(f"{prefix}.{e}.{part}.weight") for part in parts])
                    for e in range(config.num_local_experts)
                ]
            )
        else:
            value = tensors.pop(published)
        state[name] = torch.from_numpy(value)
    if tensors:
        raise ValueError(f"{directory} has tensors that the model does not: {sorted(tensors)[:5]}")
    model.load_state_dict(state)
    return model


# ---- what the oracle says


@torch.no_grad()
def oracle_logits(model: MiniMaxM2ForCausalLM, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] float32 and router margin [T] of one sequence.

    The margin of a position is the smallest gap, over the layers, between the last chosen and the first rejected biased
    score.
    """
    margins = []

    def record(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        biased = torch.sigmoid(output[0].float()) + inputs[1]
        if router.top_k == router.num_experts:  # nothing is rejected
            margins.append(torch.full((len(biased),), torch.inf))
            return
        best = biased.topk(router.top_k + 1, dim=-1).values
        margins.append(best[:, -2] - best[:, -1])

    handles = [layer.mlp.gate.register_forward_hook(record) for layer in model.model.layers]
    try:
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits.float().numpy(), torch.stack(margins).amin(dim=0).numpy()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found: the largest difference, and how many positions it looked at and left out."""

    max_abs_diff: float
    compared: int
    left_out: int


def compare(
    ours: Sequence[np.ndarray], oracle: Sequence[np.ndarray], margin: Sequence[np.ndarray], atol: float = 1e-4
) -> Comparison:
    """The rule of comparison, for all sequences of one test: logits [T, V] and router margins [T] of each.

    A position whose router margin is below 1e-5 and those after it in its sequence are left out; more than 5 % left out
    over the test is a failure, as is a difference above `atol`.

    Raises:
      AssertionError: the logits differ, or too little could be compared.
    """
    largest, compared, left_out = 0.0, 0, 0
    for ours_i, oracle_i, margin_i in zip(ours, oracle, margin, strict=True):
        if ours_i.shape != oracle_i.shape or margin_i.shape != oracle_i.shape[:1]:
            raise AssertionError(f"logits are {ours_i.shape}, the oracle's {oracle_i.shape}, margins {margin_i.shape}")
        kept = _kept(margin_i)
        difference = np.abs(ours_i[:kept].astype(np.float64) - oracle_i[:kept])
        largest = max(largest, float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)))
        compared += kept
        left_out += len(margin_i) - kept
    result = Comparison(largest, compared, left_out)
    print(result)
    if left_out > MOST_LEFT_OUT * (compared + left_out):
        raise AssertionError(f"{left_out} of {compared + left_out} positions left out, over {MOST_LEFT_OUT:.0%}")
    if largest > atol:
        raise AssertionError(f"logits differ by {largest:.3g}, over {atol:g} ({compared} positions)")
    return result


def check_greedy(model: MiniMaxM2ForCausalLM, prompt: Sequence[int], tokens: Sequence[int], atol: float = 1e-4) -> int:
    """That each of `tokens` is the oracle's likeliest after what comes before it; returns how many were checked.

    Two candidates nearer than `atol` count as a tie, and the check ends at a router margin below 1e-5.

    Raises:
      AssertionError: names the position, both tokens and the gap.
    """
    logits, margin = oracle_logits(model, [*prompt, *tokens])
    checked = 0
    for i, token in enumerate(tokens):
        at = len(prompt) + i - 1
        if _kept(margin[: at + 1]) <= at:
            break
        gap = float(logits[at].max() - logits[at, token])
        if gap > atol:
            raise AssertionError(f"token {i} is {token}, the oracle's {logits[at].argmax()}, {gap:.3g} more likely")
        checked += 1
    return checked


def _kept(margin: np.ndarray) -> int:
    """Positions before the first whose router margin is too small."""
    low = np.flatnonzero(margin < LEAST_MARGIN)
    return int(low[0]) if len(low) else len(margin)


def _eager(config: MiniMaxM2Config) -> MiniMaxM2Config:
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".e_score_correction_bias"))


def _is_packed(name: str) -> bool:
    """Whether the vendor packs this tensor: attention projections and experts."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values for one tensor of transformers' model."""
    if name.endswith("e_score_correction_bias"):
        values = rng.uniform(-0.25, 0.25, shape)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        values = rng.uniform(0.5, 2.0, shape)
    elif name.endswith("norm.weight"):
        values = rng.uniform(0.4, 1.6, shape)
    elif name == "model.embed_tokens.weight":
        values = rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        if name == "lm_head.weight":
            values *= LOGITS_STD / np.sqrt(1.12)  # the mean square of the final norm's weights
        elif name.endswith(".gate.weight"):
            values *= 1.5
        else:
            values *= _levels(rng, shape[-2])[:, None] * _levels(rng, shape[-1])
        if name.endswith("o_proj.weight"):  # a mean over many keys is small
            values *= 2
        if name.endswith("gate_up_proj"):
            experts, width = shape[0], shape[1] // 2
            values[:, :width] *= rng.uniform(1.0, 2.0, (experts, 1, 1))
            values[:, width:] *= rng.uniform(0.4, 0.8, (experts, 1, 1))
    return torch.from_numpy(values.astype(np.float32))


def _levels(rng: np.random.Generator, size: int) -> np.ndarray:
    """[size]: one level between 1/2 and 2 for each 32 in a row."""
    return (2.0 ** rng.uniform(-1, 1, -(-size // 32))).repeat(32)[:size]


def _fp8_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] float32 -> float8_e4m3fn, and a float32 multiplier for each block."""
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    scale[scale == 0] = 1.0
    payload = (blocks / scale[:, None, :, None]).clip(-FP8_MAX, FP8_MAX).reshape(padded.shape)
    return payload[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale
