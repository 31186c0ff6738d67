"""y = x W^T with a plain or packed W."""

from pallas_kernels.linear.api import linear

__all__ = ["linear"]
