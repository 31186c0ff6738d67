"""Mixture of experts: each token through its chosen experts, weighted and summed."""

from pallas_kernels.grouped_moe.api import grouped_moe

__all__ = ["grouped_moe"]
