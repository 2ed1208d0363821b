"""The exact solvers alone, on plain integers: for tests, benchmarks and tools."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.planner import _binding

_PLENTY = 2**60  # sums and their boundary costs stay below 2**63


def min_max_cuts(
    costs: Sequence[int],
    num_stages: int,
    *,
    boundary_costs: Sequence[int] | None = None,
    layer_bytes: Sequence[int] | None = None,
    stage_bytes: int = _PLENTY,
    cut_allowed: Sequence[bool] | None = None,
) -> tuple[int, list[int]] | None:
    """Cut a row of layers so that the largest stage is as small as possible.

    Args:
        costs: of each layer, n entries.
        num_stages: number of stages; none is empty.
        boundary_costs: n + 1 entries; a stage pays for both of its ends.
        layer_bytes: memory of each layer.
        stage_bytes: most bytes of a stage.
        cut_allowed: n + 1 entries; False forbids a cut before that layer.

    Returns:
        The largest stage and the lexicographically smallest cuts that reach it,
        or None if no partition satisfies the limits.

    Raises:
        ValueError: lists of unequal lengths or negative entries.
    """
    n = len(costs)
    edges = _checked(boundary_costs, "boundary_costs", n + 1)
    return _binding.planner_min_max(
        _checked(costs, "costs", n),
        edges,
        edges,
        _checked(layer_bytes, "layer_bytes", n),
        stage_bytes,
        _allowed(cut_allowed, n),
        num_stages,
    )


def gpipe_staircase(
    forward: Sequence[int],
    backward: Sequence[int],
    num_stages: int,
    *,
    layer_bytes: Sequence[int] | None = None,
    stage_bytes: int = _PLENTY,
    cut_allowed: Sequence[bool] | None = None,
) -> list[tuple[int, int, list[int]]]:
    """Find the cuts that trade the largest forward against the largest backward.

    Args:
        forward: of each layer, n entries.
        backward: of each layer, n entries.
        num_stages: number of stages; none is empty.
        layer_bytes: memory of each layer.
        stage_bytes: most bytes of a stage.
        cut_allowed: n + 1 entries; False forbids a cut before that layer.

    Returns:
        Pareto points (largest forward, largest backward, cuts) that hold the least
        sum; empty if no partition satisfies the limits.

    Raises:
        ValueError: lists of unequal lengths or negative entries.
    """
    n = len(forward)
    return _binding.planner_staircase(
        _checked(forward, "forward", n),
        _checked(backward, "backward", n),
        _checked(layer_bytes, "layer_bytes", n),
        stage_bytes,
        _allowed(cut_allowed, n),
        num_stages,
    )


def _checked(values: Sequence[int] | None, what: str, length: int) -> list[int]:
    checked = [0] * length if values is None else list(values)
    if len(checked) != length:
        raise ValueError(f"{what}: expected {length} entries, got {len(checked)}")
    if any(value < 0 for value in checked):
        raise ValueError(f"{what}: expected entries from 0, got {min(checked)}")
    if sum(checked) > _PLENTY:
        raise ValueError(f"{what}: expected a sum up to 2**60, got {sum(checked)}")
    return checked


def _allowed(values: Sequence[bool] | None, num_layers: int) -> list[bool]:
    allowed = [True] * (num_layers + 1) if values is None else list(values)
    if len(allowed) != num_layers + 1:
        raise ValueError(
            f"cut_allowed: expected {num_layers + 1} entries, got {len(allowed)}"
        )
    return allowed
