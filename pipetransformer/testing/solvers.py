"""The exact solvers alone, on plain integers: for tests, benchmarks and tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipetransformer import _C

_PLENTY = 2**60  # sums and their boundary costs stay below 2**63

_CostRow = tuple[list[int], list[int], list[int], bool]
_Rules = tuple[
    list[bool],
    list[tuple[list[int], int]],
    list[tuple[list[int], list[int], list[int], int]],
]


@dataclass(frozen=True)
class Costs:
    """What a stage costs: its layers and the copies at both of its ends.

    Attributes:
        layers: Of each layer, n entries.
        boundaries: n + 1 entries; a stage pays for both of its ends. None: nothing.
        overlapped: Whether copies run alongside the layers: a stage then costs the
            largest of its layers and its two copies instead of their sum.
    """

    layers: Sequence[int]
    boundaries: Sequence[int] | None = None
    overlapped: bool = False


@dataclass(frozen=True)
class Limits:
    """What a stage may hold and where it may begin.

    Attributes:
        layer_bytes: Memory of each layer, n entries.
        stage_bytes: Most bytes of a stage.
        kept_bytes: Memory of each layer per micro-batch kept, n entries.
        microbatches_kept: Per stage, how many micro-batches it keeps.
        cut_allowed: n + 1 entries; False forbids a cut before that layer.
    """

    layer_bytes: Sequence[int] | None = None
    stage_bytes: int = _PLENTY
    kept_bytes: Sequence[int] | None = None
    microbatches_kept: Sequence[int] | None = None
    cut_allowed: Sequence[bool] | None = None


_UNLIMITED = Limits()


def min_max_cuts(
    costs: Sequence[int] | Costs, num_stages: int, *, limits: Limits = _UNLIMITED
) -> tuple[int, list[int]] | None:
    """Cut a row of layers so that the largest stage is as small as possible.

    Args:
        costs: Of each layer, n entries, or with copies.
        num_stages: Number of stages; none is empty.
        limits: What a stage may hold.

    Returns:
        The largest stage and the lexicographically smallest cuts that reach it,
        or None if no partition satisfies the limits.

    Raises:
        ValueError: lists of unequal lengths, negative entries or sums above 2**60.
    """
    row = _cost_row(costs, "costs")
    rules = _rules(limits, len(row[0]), num_stages)
    return _C.planner.min_max(row, rules, num_stages)


def min_max_memory(
    limits: Limits, num_layers: int, num_stages: int
) -> tuple[int, list[int]] | None:
    """Cut a row of layers so that the largest stage needs the least memory.

    Args:
        limits: What each layer holds; ``stage_bytes`` does not count.
        num_layers: Number of layers.
        num_stages: Number of stages; none is empty.

    Returns:
        Bytes of the largest stage and the lexicographically smallest cuts, or None
        if there are too few places to cut.

    Raises:
        ValueError: see ``min_max_cuts``.
    """
    if limits.microbatches_kept is None:
        nothing = (0,) * max(num_stages, 0)
        limits = replace(limits, kept_bytes=None, microbatches_kept=nothing)
    rules = _rules(limits, num_layers, num_stages)
    return _C.planner.min_max_by_position(rules, num_stages)


def gpipe_staircase(
    forward: Sequence[int] | Costs,
    backward: Sequence[int] | Costs,
    num_stages: int,
    *,
    limits: Limits = _UNLIMITED,
) -> list[tuple[int, int, list[int]]]:
    """Find the cuts that trade the largest forward against the largest backward.

    Args:
        forward: Of each layer, n entries, or with copies.
        backward: Of each layer, n entries, or with copies.
        num_stages: Number of stages; none is empty.
        limits: What a stage may hold.

    Returns:
        Pareto points (largest forward, largest backward, cuts) that hold the least
        sum; empty if no partition satisfies the limits.

    Raises:
        ValueError: see ``min_max_cuts``.
    """
    first = _cost_row(forward, "forward")
    second = _cost_row(backward, "backward", len(first[0]))
    rules = _rules(limits, len(first[0]), num_stages)
    return _C.planner.staircase(first, second, rules, num_stages)


def cheapest_cuts(
    cut_costs: Sequence[int], num_stages: int, *, limits: Limits = _UNLIMITED
) -> tuple[int, list[int]] | None:
    """Cut a row of layers where the cuts cost least in total.

    Args:
        cut_costs: n + 1 entries; the first and the last do not count.
        num_stages: Number of stages; none is empty.
        limits: What a stage may hold.

    Returns:
        The total and the lexicographically smallest cuts that reach it, or None if
        no partition satisfies the limits.

    Raises:
        ValueError: see ``min_max_cuts``.
    """
    n = len(cut_costs) - 1
    rules = _rules(limits, n, num_stages)
    checked = _checked(cut_costs, "cut_costs", n + 1)
    return _C.planner.cheapest_cuts(checked, rules, num_stages)


def best_cuts(
    forward: Sequence[int] | Costs,
    backward: Sequence[int] | Costs | None,
    num_stages: int,
    *,
    repeats: int,
    cut_costs: Sequence[int] | None = None,
    hiding_cut_costs: Sequence[int] | None = None,
    reduce_costs: Sequence[int] | None = None,
    reduce_slack: Sequence[int] | None = None,
    accumulation_steps: int = 1,
    limits: Limits = _UNLIMITED,
    cutoff: int | None = None,
) -> tuple[int, list[int], bool] | None:
    """Cut a row of layers so that all that cuts decide of a step is least.

    That is ``repeats`` times the largest forward plus the largest backward of a
    stage, plus the costs of the cuts, plus the longest exposed all-reduce over
    ``accumulation_steps``, rounded down. A stage from layer i on exposes what its
    layers reduce, less ``reduce_slack[i]`` (or 0), less what hides it of the stages
    before: ``repeats`` times how much slower than it and all later ones their slowest
    backward is, and the hiding costs of their cuts.

    Args:
        forward: Of each layer, n entries, or with copies.
        backward: The same; None if ``forward`` holds both.
        num_stages: Number of stages; none is empty.
        repeats: Number of micro-batches less one.
        cut_costs: n + 1 entries, paid once for each inner cut.
        hiding_cut_costs: n + 1 entries, the part of each that hides all-reduces.
        reduce_costs: All-reduce time of each layer, n entries.
        reduce_slack: n + 1 entries that do not decrease.
        accumulation_steps: Of so many steps one has an all-reduce; at least 1.
        limits: What a stage may hold.
        cutoff: Cuts that cost more are of no interest.

    Returns:
        The least value, the lexicographically smallest cuts that reach it and
        whether it is proven to be the least; None if no partition satisfies the
        limits and the cutoff.

    Raises:
        ValueError: see ``min_max_cuts``; ``repeats`` below 0, or
            ``accumulation_steps`` below 1.
    """
    first = _cost_row(forward, "forward")
    n = len(first[0])
    second = None if backward is None else _cost_row(backward, "backward", n)
    largest = sum(map(sum, first[:3])) + sum(map(sum, second[:3] if second else ()))
    if repeats < 0 or repeats * largest > _PLENTY:
        raise ValueError(f"repeats: expected 0 to 2**60 / all costs, got {repeats}")
    if accumulation_steps < 1:
        raise ValueError(
            f"accumulation_steps: expected at least 1, got {accumulation_steps}"
        )
    cuts = _checked(cut_costs, "cut_costs", n + 1)
    hiding = _checked(hiding_cut_costs, "hiding_cut_costs", n + 1)
    if any(part > whole for part, whole in zip(hiding, cuts, strict=True)):
        raise ValueError("hiding_cut_costs: expected at most cut_costs, got more")
    exposure = None
    if reduce_costs is not None:
        slack = _checked(reduce_slack, "reduce_slack", n + 1, summed=False)
        if slack != sorted(slack):
            raise ValueError(f"reduce_slack: expected rising entries, got {slack}")
        exposure = (_checked(reduce_costs, "reduce_costs", n), slack)
    return _C.planner.best_cuts(
        first,
        second,
        repeats,
        cuts,
        hiding,
        exposure,
        accumulation_steps,
        _rules(limits, n, num_stages),
        num_stages,
        cutoff,
    )


def _cost_row(
    costs: Sequence[int] | Costs, what: str, length: int | None = None
) -> _CostRow:
    row = costs if isinstance(costs, Costs) else Costs(costs)
    n = len(row.layers) if length is None else length
    edges = _checked(row.boundaries, f"{what}: boundaries", n + 1)
    return _checked(row.layers, what, n), edges, edges, row.overlapped


def _rules(limits: Limits, n: int, num_stages: int) -> _Rules:
    allowed = [True] * (n + 1)
    if limits.cut_allowed is not None:
        allowed = list(limits.cut_allowed)
    if len(allowed) != n + 1:
        raise ValueError(f"cut_allowed: expected {n + 1} entries, got {len(allowed)}")
    fixed = _checked(limits.layer_bytes, "layer_bytes", n)
    if limits.microbatches_kept is None:
        if limits.kept_bytes is not None:
            raise ValueError("microbatches_kept: expected one per stage, got None")
        return allowed, [(fixed, limits.stage_bytes)], []
    stages = max(num_stages, 0)
    counts = _checked(limits.microbatches_kept, "microbatches_kept", stages)
    kept = _checked(limits.kept_bytes, "kept_bytes", n)
    if max(counts, default=0) * sum(kept) > _PLENTY:
        raise ValueError("kept_bytes x microbatches_kept: expected a sum up to 2**60")
    return allowed, [], [(fixed, kept, counts, limits.stage_bytes)]


def _checked(
    values: Sequence[int] | None, what: str, length: int, *, summed: bool = True
) -> list[int]:
    checked = [0] * length if values is None else list(values)
    if len(checked) != length:
        raise ValueError(f"{what}: expected {length} entries, got {len(checked)}")
    least = min(checked, default=0)
    if least < 0:
        raise ValueError(f"{what}: expected entries from 0, got {least}")
    total = sum(checked) if summed else max(checked, default=0)
    if total > _PLENTY:
        raise ValueError(f"{what}: expected a sum up to 2**60, got {total}")
    return checked
