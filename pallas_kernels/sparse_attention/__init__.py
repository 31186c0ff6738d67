"""Causal attention of new queries over chosen blocks of a paged cache."""

from pallas_kernels.sparse_attention.api import sparse_attention

__all__ = ["sparse_attention"]
