"""Cuts a sequence of costs into blocks whose largest sum is smallest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Find the exact minimum of the largest block sum.

    Args:
        sequence: Costs in order, zeros included.
        partitions: Number of blocks, none of them empty.

    Returns:
        The blocks, in order. Of several best ones, one with a small sum of squares.

    Raises:
        ValueError: if there are fewer blocks than one or fewer costs than blocks.
    """
    if partitions < 1:
        raise ValueError(
            f"partitions: expected a positive number of blocks, got {partitions}"
        )
    length = len(sequence)
    if length < partitions:
        raise ValueError(
            f"sequence: expected at least one cost per block ({partitions}), got "
            f"{length}"
        )
    sums = [0, *itertools.accumulate(sequence)]
    # best[end] = (largest sum, sum of squares, cuts) of the first `end` costs in as
    # many blocks as rounds have passed; the dynamic program of the linear partition.
    best = {0: (float("-inf"), 0.0, [0])}
    for block in range(1, partitions + 1):
        ends = range(block, length - (partitions - block) + 1)
        best = {
            end: min(
                (max(largest, cost), squares + cost * cost, [*cuts, end])
                for start, (largest, squares, cuts) in best.items()
                if start < end
                for cost in (sums[end] - sums[start],)
            )
            for end in ends
        }
    cuts = best[length][2]
    return [list(sequence[a:b]) for a, b in itertools.pairwise(cuts)]
