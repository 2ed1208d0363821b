"""Ways to cut a row of layers, and the optimum to judge them by."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from pipetransformer.planner.paper import greedy_partition
from pipetransformer.testing.solvers import Costs, min_max_cuts
from planner.layer_rows import LayerRow

Partitioner = Callable[[LayerRow], list[int]]

OURS = "ours"


def ours(row: LayerRow) -> list[int]:
    """Cut by the exact solver."""
    found = min_max_cuts(Costs(row.times, row.copies), row.num_stages)
    if found is None:
        raise ValueError(f"{row.kind}: expected a partition, got none")
    return found[1]


def greedy_on_parameters(row: LayerRow) -> list[int]:
    """Cut by the paper's rule; stages may be empty."""
    return _ends(greedy_partition(row.parameters, row.num_stages))


def greedy_on_times(row: LayerRow) -> list[int]:
    """Cut by the paper's rule on times.

    The rule adds a mean and a variance, so it depends on the unit: times are scaled
    to the sum of the parameters.
    """
    scale = max(1, sum(row.parameters)) / sum(row.times)
    sizes = [round(time * scale) for time in row.times]
    return _ends(greedy_partition(sizes, row.num_stages))


def equal_counts(row: LayerRow) -> list[int]:
    """Give every stage as many layers as any other, the first ones one more."""
    each, more = divmod(len(row.times), row.num_stages)
    return _ends([each + (k < more) for k in range(row.num_stages)])


def block_partition(row: LayerRow) -> list[int]:
    """Cut so that the stages differ by at most the largest layer.

    While they differ by more, the largest block hands its outmost layer towards the
    nearest of the smallest blocks; a block that would get as large hands on one of
    its own. Copies are not looked at.

    Source: Bárány and Grinberg, Block partitions of sequences (2015).
    """
    costs = [max(1, time) for time in row.times]
    return _balanced(costs, [*range(row.num_stages), len(costs)])


def _balanced(costs: list[int], cuts: list[int]) -> list[int]:
    sums = [0, *accumulate(costs)]
    most_moves = len(costs) ** 3

    def size(block: int) -> int:
        return sums[cuts[block + 1]] - sums[cuts[block]]

    for _ in range(most_moves):
        sizes = [size(block) for block in range(len(cuts) - 1)]
        largest = max(sizes)
        if largest - min(sizes) <= max(costs):
            return cuts
        giver = sizes.index(largest)
        smallest = [b for b, s in enumerate(sizes) if s == min(sizes)]
        goal = min(smallest, key=lambda block: abs(block - giver))
        step = 1 if goal > giver else -1
        while giver != goal:
            cuts[giver + 1 if step > 0 else giver] -= step
            giver += step
            if size(giver) < largest:
                break
    raise RuntimeError(f"block partition: expected at most {most_moves} moves")


def optimum(row: LayerRow) -> int:
    """Return the smallest possible largest stage, by the table over all cuts."""
    n = len(row.times)
    sums = [0, *accumulate(row.times)]
    opened = [row.copies[i] - sums[i] for i in range(n + 1)]
    best = {0: 0}
    for k in range(row.num_stages):
        last = k == row.num_stages - 1
        best = {
            end: min(
                max(value, opened[begin] + closed)
                for begin, value in best.items()
                if begin < end
            )
            for end in (range(n, n + 1) if last else range(k + 1, n))
            for closed in (sums[end] + row.copies[end],)
        }
    return best[n]


PARTITIONERS: dict[str, Partitioner] = {
    OURS: ours,
    "paper greedy, parameters": greedy_on_parameters,
    "paper greedy, times": greedy_on_times,
    "Block Partition, times": block_partition,
    "equal layer counts": equal_counts,
}


def _ends(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]
