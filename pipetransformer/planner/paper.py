"""The paper's rules for cuts, K and M: a baseline, never the default.

Models are lists of unit sizes in parameters: the embedding, attention and MLP of
each block, then the tail. Source: PipeTransformer (ICML 2021), section 3.2, and the
settings of its published runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer import _C

_UNITS_PER_BLOCK = 2


def greedy_partition(
    unit_sizes: Sequence[int], num_stages: int, *, frozen_sizes: Sequence[int] = ()
) -> list[int]:
    """Cut units onto stages by the paper's greedy rule.

    A stage takes the next unit while its load stays below mean plus variance of
    the sizes that were unassigned when it opened, in millions of parameters. Frozen
    units weigh a sixth of their size, and the first stage has them all: it opens with
    that load, which counts in its mean and not in its variance.

    Args:
        unit_sizes: parameters of each active unit.
        num_stages: number of stages; some may stay empty.
        frozen_sizes: parameters of each frozen unit that is charged. Empty, as in the
            code of the published runs: frozen layers are free.

    Returns:
        Number of active units per stage.

    Raises:
        ValueError: ``num_stages`` below 1, or a size below 0 or above 2**40.

    Source: paper section 3.2, Algorithm 1, lambda = 1/6.
    """
    return _C.planner.paper_partition(list(unit_sizes), list(frozen_sizes), num_stages)


def largest_load(
    unit_sizes: Sequence[int], num_stages: int, *, frozen_sizes: Sequence[int] = ()
) -> int:
    """Return the largest stage's load in parameters, rounded up.

    Args:
        unit_sizes: as for `greedy_partition`, like all that follow.
        num_stages: number of stages.
        frozen_sizes: of which the first stage bears a sixth.
    """
    return _C.planner.paper_largest_load(
        list(unit_sizes), list(frozen_sizes), num_stages
    )


def compress(
    active_unit_sizes: Sequence[int],
    num_stages: int,
    *,
    largest_allowed: int,
    frozen_sizes: Sequence[int] = (),
) -> int:
    """Halve the pipeline while its largest stage stays small enough.

    Args:
        active_unit_sizes: parameters of the units that are not frozen.
        num_stages: current pipeline length.
        largest_allowed: parameters of the largest stage of the unfrozen model.
        frozen_sizes: as for `greedy_partition`.

    Returns:
        The new pipeline length.

    Source: paper section 3.2, pipeline compression.
    """
    return _C.planner.paper_compress(
        list(active_unit_sizes), list(frozen_sizes), num_stages, largest_allowed
    )


def num_stages_by_epoch(
    unit_sizes: Sequence[int],
    frozen_blocks: Sequence[int],
    *,
    num_stages: int = 8,
    charge_frozen: bool = False,
) -> list[int]:
    """Follow the pipeline length through a freeze schedule.

    Args:
        unit_sizes: parameters of each unit: embedding, two per block, tail.
        frozen_blocks: number of frozen blocks at each epoch. With the first block
            the embedding freezes too.
        num_stages: pipeline length of the unfrozen model.
        charge_frozen: charge the first stage a sixth of the frozen units, as the
            paper's Algorithm 1 does and the code of its published runs does not.

    Returns:
        Pipeline length at each epoch.
    """
    largest_allowed = largest_load(unit_sizes, num_stages)
    lengths = []
    previous = 0
    for frozen in frozen_blocks:
        if frozen != previous and frozen > 0:
            first_active = 1 + _UNITS_PER_BLOCK * frozen
            num_stages = compress(
                unit_sizes[first_active:],
                num_stages,
                largest_allowed=largest_allowed,
                frozen_sizes=unit_sizes[:first_active] if charge_frozen else (),
            )
        previous = frozen
        lengths.append(num_stages)
    return lengths


def num_microbatches(num_stages: int) -> int:
    """Return M of the published runs: 16, and 4 on a single device."""
    return _C.planner.paper_num_microbatches(num_stages)


def microbatch_candidates(num_stages: int) -> list[int]:
    """Return the M that the paper's profiler tries: K, K+1, ... 6K."""
    return list(range(num_stages, 6 * num_stages + 1))
