"""The paper's rules for cuts, K and M: a baseline, never the default.

Models are lists of unit sizes in parameters: the embedding, attention and MLP of
each block, then the tail. Source: PipeTransformer (ICML 2021), section 3.2, and the
settings of its published runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.planner import _binding

_UNITS_PER_BLOCK = 2


def greedy_partition(unit_sizes: Sequence[int], num_stages: int) -> list[int]:
    """Cut units onto stages by the paper's greedy rule.

    A stage takes the next unit while its load stays below mean plus variance of
    the sizes that were unassigned when it opened, in millions of parameters.

    Args:
        unit_sizes: parameters of each unit.
        num_stages: number of stages; some may stay empty.

    Returns:
        Number of units per stage.

    Raises:
        ValueError: ``num_stages`` below 1, or a size below 0 or above 2**40.

    Source: paper section 3.2, Algorithm 1, without the discount for frozen layers.
    """
    return _binding.planner_paper_partition(list(unit_sizes), num_stages)


def largest_load(unit_sizes: Sequence[int], num_stages: int) -> int:
    """Return the parameters of the largest stage of the greedy partition."""
    return _binding.planner_paper_largest_load(list(unit_sizes), num_stages)


def compress(
    active_unit_sizes: Sequence[int], num_stages: int, *, largest_allowed: int
) -> int:
    """Halve the pipeline while its largest stage stays small enough.

    Args:
        active_unit_sizes: parameters of the units that are not frozen.
        num_stages: current pipeline length.
        largest_allowed: parameters of the largest stage of the unfrozen model.

    Returns:
        The new pipeline length.

    Source: paper section 3.2, pipeline compression.
    """
    return _binding.planner_paper_compress(
        list(active_unit_sizes), num_stages, largest_allowed
    )


def num_stages_by_epoch(
    unit_sizes: Sequence[int],
    frozen_blocks: Sequence[int],
    *,
    num_stages: int = 8,
) -> list[int]:
    """Follow the pipeline length through a freeze schedule.

    Args:
        unit_sizes: parameters of each unit: embedding, two per block, tail.
        frozen_blocks: number of frozen blocks at each epoch. With the first block
            the embedding freezes too.
        num_stages: pipeline length of the unfrozen model.

    Returns:
        Pipeline length at each epoch.
    """
    largest_allowed = largest_load(unit_sizes, num_stages)
    lengths = []
    previous = 0
    for frozen in frozen_blocks:
        if frozen != previous and frozen > 0:
            active = unit_sizes[1 + _UNITS_PER_BLOCK * frozen :]
            num_stages = compress(active, num_stages, largest_allowed=largest_allowed)
        previous = frozen
        lengths.append(num_stages)
    return lengths


def num_microbatches(num_stages: int) -> int:
    """Return M of the published runs: 16, and 4 on a single device."""
    return _binding.planner_paper_num_microbatches(num_stages)


def microbatch_candidates(num_stages: int) -> list[int]:
    """Return the M that the paper's profiler tries: K, K+1, ... 6K."""
    return list(range(num_stages, 6 * num_stages + 1))
