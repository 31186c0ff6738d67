"""What M3's sparse attention reads: the best index score of each key block, and the blocks that are chosen by it."""

from pallas_kernels.block_scores.api import block_scores
from pallas_kernels.block_scores.select import select_blocks

__all__ = ["block_scores", "select_blocks"]
