"""MiniMax-M2 inference in JAX/XLA for AMD ROCm, NVIDIA and CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimax_jax.llm import LLM
    from minimax_jax.outputs import CompletionOutput, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import minimax_jax` stays light."""
    if name not in __all__:
        raise AttributeError(f"module 'minimax_jax' has no attribute {name!r}")
    if name == "LLM":
        from minimax_jax import llm

        return llm.LLM
    from minimax_jax import outputs

    return getattr(outputs, name)
