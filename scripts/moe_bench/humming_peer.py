"""The same layer through humming-kernels (CUDA, weights in FP4, activations in bfloat16), in both of its MoE layouts.

Weights, scales and inputs are random like ours, the routings are the same. Parts are timed as CUDA graphs of all
repetitions. Runs inside `torch_worker`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_bench.cases import Layer, Routing, default_repeats, routings
from moe_bench.torch_worker import cuda_seconds

LAYOUTS = ("indexed", "grouped_contiguous")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclasses.dataclass
class Matrices:
    """E packed matrices [rows, cols]: `raw` as in a checkpoint, `tensors` in the library's own order."""

    raw: dict[str, Any]
    config: Any
    tensors: dict[str, Any]


def measure(
    layer: dict[str, Any],
    format: str,
    tokens: Sequence[int],
    seed: int,
    repeats: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """{"version": ..., "cases": {tokens: {layout: {part: seconds, "relative_error": ...} or {"error": ...}}}}."""
    import humming
    import torch

    sizes = Layer(**layer)
    torch.manual_seed(seed)
    with torch.inference_mode():
        w13 = random_matrices(sizes.E, 2 * sizes.F, sizes.D, format)
        w2 = random_matrices(sizes.E, sizes.D, sizes.F, format)
        cases: dict[int, dict[str, Any]] = {N: {} for N in tokens}
        for layout in LAYOUTS:
            try:
                kernels = [prepare(matrices, layout, tokens, sizes.k) for matrices in (w13, w2)]
            except Exception as error:
                for N in tokens:
                    cases[N][layout] = _failure(error)
                continue
            say(f"  humming {layout}: kernels compiled")
            for i, N in enumerate(tokens):
                routing = routings(sizes, N, repeats or default_repeats(N), seed)
                try:
                    made = _Case(sizes, layout, routing, w13, w2, kernels[0][i], kernels[1][i])
                    cases[N][layout] = made.measure()
                    del made
                except Exception as error:
                    cases[N][layout] = _failure(error)
                torch.cuda.empty_cache()
                say(f"  {N:5d} tokens  humming {layout} {_describe(cases[N][layout])}")
        del w13, w2
    torch.cuda.empty_cache()
    return {"version": humming.__version__, "cases": cases}


def random_matrices(E: int, rows: int, cols: int, format: str) -> Matrices:
    """Random codes; scales as in `weights.random_weight`."""
    import torch
    from humming import dtypes
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    group = {"mxfp4": 32, "nvfp4": 16}[format]
    target = 1 / (float(np.sqrt(np.mean(np.square(E2M1)))) * cols**0.5)
    raw = {"weight": torch.randint(-(2**31), 2**31, (E, rows, cols // 8), dtype=torch.int32, device="cuda")}
    shape = (E, rows, cols // group)
    if format == "mxfp4":
        base = 127 + round(np.log2(target)) - 2
        scale = torch.randint(base, base + 4, shape, dtype=torch.uint8, device="cuda")
        raw["weight_scale"] = scale.view(torch.float8_e8m0fnu)
        schema = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=group
        )
    else:
        scale = torch.randint(0x30, 0x40, shape, dtype=torch.uint8, device="cuda")
        raw["weight_scale"] = scale.view(torch.float8_e4m3fn)
        raw["weight_scale_2"] = target / 1.2 * (0.9 + 0.2 * torch.rand(E, device="cuda"))
        schema = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1,
            bs_dtype=dtypes.float8e4m3,
            weight_scale_group_size=group,
            weight_scale_2_type="tensor",
        )
    config, tensors = prepare_and_transform_humming_tensors(
        raw, shape_n=rows, shape_k=cols, weight_schema=schema, num_experts=E, torch_dtype=torch.bfloat16, device=0
    )
    return Matrices(raw, config, tensors)


def decode(matrices: Matrices, expert: int) -> Any:
    """One matrix in float32, from what a checkpoint would hold."""
    import torch

    words = matrices.raw["weight"][expert]
    codes = (words[..., None] >> torch.arange(0, 32, 4, device="cuda", dtype=torch.int32)) & 15
    values = torch.tensor(E2M1, device="cuda")[codes.long()].flatten(-2)
    scale = matrices.raw["weight_scale"][expert].float()
    if "weight_scale_2" in matrices.raw:
        scale = scale * matrices.raw["weight_scale_2"][expert]
    return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)


def prepare(matrices: Matrices, layout: str, tokens: Sequence[int], k: int) -> list[tuple[Any, int]]:
    """(compiled kernel, its rows a block) that the library's own heuristics choose for each number of tokens."""
    from humming.config import ComputeConfig, GemmType
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    kind = GemmType(layout)
    values = [get_heuristics_config(matrices.config, shape_m=N * k, gemm_type=kind, device=0) for N in tokens]
    compute = ComputeConfig(gemm_type=kind).to_str()
    distinct = list({repr(value): value for value in values}.values())
    configs = [(0, 1 << 30, value) for value in distinct]
    made = HummingKernel.prepare_kernels(matrices.config.to_str(), compute, configs, device=0).reshape(-1, 4)
    kernels = {repr(value): kernel.contiguous() for value, kernel in zip(distinct, made, strict=True)}
    return [(kernels[repr(value)], value["block_shape"][0]) for value in values]


def align(ids: np.ndarray, E: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(sorted rows, each expert's filled up to whole blocks with the number of rows; the expert of each block)."""
    flat = ids.reshape(-1)
    rows, experts = [], []
    order = np.argsort(flat, kind="stable")
    for expert, start, end in zip(range(E), *_bounds(flat, E), strict=True):
        count = end - start
        blocks = -(-count // block)
        rows.append(np.concatenate([order[start:end], np.full(blocks * block - count, flat.size)]))
        experts.extend([expert] * blocks)
    return np.concatenate(rows).astype(np.int32), np.array(experts, np.int32)


def activation_code(layer: Layer) -> str:
    """The activation as a C++ expression of gate `a` and up `b`."""
    gate, up = "a", "b"
    if layer.limit is not None:
        limit = f"{float(layer.limit)}f"
        gate, up = f"fminf(a, {limit})", f"fminf(fmaxf(b, -{limit}), {limit})"
    return f"{gate} / (1.0f + __expf(-{float(layer.alpha)}f * {gate})) * ({up} + {float(layer.beta)}f)"


class _Case:
    """One number of tokens in one layout; each part is a function that runs one repetition of it."""

    def __init__(
        self,
        layer: Layer,
        layout: str,
        cases: Sequence[Routing],
        w13: Matrices,
        w2: Matrices,
        kernel13: tuple[Any, int],
        kernel2: tuple[Any, int],
    ):
        import torch

        self.layer, self.grouped, self.cases = layer, layout != "indexed", cases
        self.w13, self.w2 = w13, w2
        self.out: Any = None
        N, k = cases[0].expert_ids.shape
        R = N * k
        self.kernel13, self.kernel2 = kernel13[0], kernel2[0]
        self.locks = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.x = torch.randn(len(cases), N, layer.D, **bf16)
        self.gates = [torch.tensor(case.weights, **bf16) for case in cases]
        self.gate_up_rows = torch.empty(R, 2 * layer.F, **bf16)
        self.hidden = torch.empty(R, layer.F, **bf16)
        self.rows = torch.empty(R, layer.D, **bf16)
        self.plans13 = [self._plan(case, kernel13[1]) for case in cases]
        self.plans2 = [self._plan(case, kernel2[1]) for case in cases]
        self.places, self.tokens = [], []  # where each token's rows are; the token of each row in the experts' order
        for case in cases:
            order = np.argsort(case.expert_ids.reshape(-1), kind="stable")
            place = np.argsort(order) if self.grouped else np.arange(R)
            self.places.append(torch.tensor(place, device="cuda"))
            self.tokens.append(torch.tensor(order // k, device="cuda"))
        self.bag_starts = torch.arange(0, R, k, device="cuda")
        self.sum = self.sum_as_bag

    def measure(self) -> dict[str, Any]:
        """Seconds of each part and of all of them, "experts"."""
        for part in (self.gate_up, self.activate, self.down):  # what compiles at first use, and fills the buffers
            part(0)
        self.sum = min((self.sum_as_bag, self.sum_as_product), key=lambda sum: cuda_seconds(lambda: sum(0), 9))
        parts = {"gate_up": self.gate_up, "activation": self.activate, "down": self.down, "sum": self.sum}
        self.whole(0)
        result: dict[str, Any] = {"relative_error": self._relative_error()}
        for name, part in {**parts, "experts": self.whole}.items():
            result[name], result["graph"] = _graph_seconds(part, len(self.cases))
        return result

    def whole(self, i: int) -> None:
        self.gate_up(i)
        self.activate(i)
        self.down(i)
        self.sum(i)

    def gate_up(self, i: int) -> None:
        x = self.x[i].index_select(0, self.tokens[i]) if self.grouped else self.x[i]
        self._launch(self.kernel13, self.w13, x, self.gate_up_rows, self.layer.k, self.plans13[i])

    def activate(self, i: int) -> None:
        from humming import ops

        code = activation_code(self.layer)
        ops.process_input(self.gate_up_rows, outputs=self.hidden, activation_type="binary_split", activation_impl=code)

    def down(self, i: int) -> None:
        self._launch(self.kernel2, self.w2, self.hidden, self.rows, 1, self.plans2[i])

    def sum_as_bag(self, i: int) -> None:
        import torch

        self.out = torch.nn.functional.embedding_bag(
            self.places[i], self.rows, self.bag_starts, mode="sum", per_sample_weights=self.gates[i].flatten()
        )

    def sum_as_product(self, i: int) -> None:
        import torch

        rows = self.rows.index_select(0, self.places[i]) if self.grouped else self.rows
        self.out = torch.bmm(self.gates[i][:, None], rows.view(*self.gates[i].shape, -1))[:, 0]

    def _launch(self, kernel: Any, matrices: Matrices, inputs: Any, outputs: Any, k: int, plan: dict[str, Any]) -> None:
        from humming import ops

        ops.launch_kernel(
            configs=kernel, inputs=inputs, outputs=outputs, locks=self.locks, top_k=k, **plan, **matrices.tensors
        )

    def _plan(self, case: Routing, block: int) -> dict[str, Any]:
        import torch

        if self.grouped:
            start, end = _bounds(case.expert_ids.reshape(-1), self.layer.E)
            layout = np.concatenate([start[:1], end]).astype(np.int64)
            return {"expert_layout": torch.tensor(layout, device="cuda")}
        rows, experts = align(case.expert_ids, self.layer.E, block)
        return {
            "sorted_ids": torch.tensor(rows, device="cuda"),
            "expert_ids": torch.tensor(experts, device="cuda"),
            "num_tokens_padded": torch.tensor(len(rows), dtype=torch.int32, device="cuda"),
        }

    def _relative_error(self) -> float:
        """Of the first token of the first repetition, against decoded weights in float32."""
        import torch

        layer, x = self.layer, self.x[0, 0].float()
        want = torch.zeros(layer.D, device="cuda")
        for expert, weight in zip(self.cases[0].expert_ids[0].tolist(), self.cases[0].weights[0].tolist(), strict=True):
            gate, up = (decode(self.w13, expert) @ x).split(layer.F)
            if layer.limit is not None:
                gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
            hidden = gate * torch.sigmoid(layer.alpha * gate) * (up + layer.beta)
            want += weight * (decode(self.w2, expert) @ hidden)
        return float((self.out[0].float() - want).norm() / want.norm())


def _bounds(flat: np.ndarray, E: int) -> tuple[np.ndarray, np.ndarray]:
    end = np.cumsum(np.bincount(flat, minlength=E))
    return np.concatenate([[0], end[:-1]]), end


def _graph_seconds(part: Callable[[int], None], repeats: int) -> tuple[float, bool]:
    """(seconds a repetition, whether it was a CUDA graph; launches from the host count where none could be made)."""
    import torch

    def all_of_them() -> None:
        for i in range(repeats):
            part(i)

    all_of_them()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
    except RuntimeError:
        torch.cuda.synchronize()
        return cuda_seconds(all_of_them, 10) / repeats, False
    return cuda_seconds(graph.replay, 15) / repeats, True


def _failure(error: Exception) -> dict[str, Any]:
    first = (str(error).strip().splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first}"[:300]}


def _describe(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"not measured: {result['error']}"
    wrong = "" if result["relative_error"] < 0.02 else "  TOO LARGE"
    return f"{result['experts'] * 1e6:8.1f} us, relative error {result['relative_error']:.1e}{wrong}"
