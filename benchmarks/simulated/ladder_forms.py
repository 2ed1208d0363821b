"""What the ladder's GPipe rungs take by formula, with no overhead and free links.

Unit: the forward of one block for 25 samples. Source: GPipe, section 2.3;
PipeTransformer (ICML 2021), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from simulated.ladder_instance import STATIC_LENGTH, TIMED_ROWS, Instance

WORK = 3  # of a block that trains: forward 1, backward 2
MICROBATCHES = 16  # the paper's, K >= 2
# Worked out beforehand, as the rows of the ladder.
EXPECTED = {
    "freezing only": 1.49,
    "bound": 5.38,
    "work ratio": 3.75,
    "work ratio with advance forwards": 3.34,
}


def gpipe_step(
    forward: Sequence[Fraction], backward: Sequence[Fraction], num_microbatches: int
) -> Fraction:
    """Return sum(f + b) + (M - 1)(max f + max b), times per micro-batch and stage."""
    longest = max(forward) + max(backward)
    once = sum(forward, Fraction(0)) + sum(backward, Fraction(0))
    return once + (num_microbatches - 1) * longest


def equal_stages(blocks: int, num_stages: int) -> list[Fraction]:
    """Return blocks per stage, as equal as halves of blocks allow."""
    halves = 2 * blocks
    return [
        Fraction((k + 1) * halves // num_stages - k * halves // num_stages, 2)
        for k in range(num_stages)
    ]


def pipeline_step(
    active_blocks: int, num_stages: int, num_microbatches: int, rows: int
) -> Fraction:
    """Return a step of a pipeline whose batch has ``rows`` rows.

    Where the rows cannot be split equally, micro-batches take their mean.
    """
    size = Fraction(rows, num_microbatches * TIMED_ROWS)
    stages = [size * blocks for blocks in equal_stages(active_blocks, num_stages)]
    backward = [(WORK - 1) * blocks for blocks in stages]
    return gpipe_step(stages, backward, num_microbatches)


def left_in_stages(instance: Instance) -> Fraction:
    """Return the speed-up of freezing alone over the static pipeline.

    Frozen blocks stay where they are and run their forward; a stage that still has
    active blocks sets the pace of the backward.
    """
    stages = equal_stages(instance.num_blocks, STATIC_LENGTH)
    total = Fraction(0)
    for frozen in instance.frozen_blocks():
        ends = [sum(stages[: k + 1], Fraction(0)) for k in range(STATIC_LENGTH)]
        backward = [
            (WORK - 1) * max(Fraction(0), min(blocks, end - frozen))
            for blocks, end in zip(stages, ends, strict=True)
        ]
        total += gpipe_step(stages, backward, MICROBATCHES)
    whole = gpipe_step(stages, [(WORK - 1) * s for s in stages], MICROBATCHES)
    return len(instance.frozen_blocks()) * whole / total


def paper_system(
    instance: Instance, *, cached: bool, batch_grows: bool, shrinks: bool = True
) -> Fraction:
    """Return the speed-up of the paper's system: K halves, prefix serial.

    Args:
        instance: Of which model, cluster and schedule.
        cached: Each frozen block runs once per sample more, when it freezes; else in
            every epoch.
        batch_grows: A pipeline keeps its batch, so there are fewer steps; else each
            step is split over more pipelines.
        shrinks: Whether K follows the paper's rule; else it stays 8.
    """
    static_rows = instance.global_batch // (
        instance.num_nodes * instance.devices_per_node // STATIC_LENGTH
    )
    static = pipeline_step(
        instance.num_blocks, STATIC_LENGTH, MICROBATCHES, static_rows
    )
    total, before = Fraction(0), 0
    lengths = instance.paper_lengths()
    if not shrinks:
        lengths = [STATIC_LENGTH] * len(lengths)
    for frozen, length in zip(instance.frozen_blocks(), lengths, strict=True):
        replicas = instance.num_nodes * (instance.devices_per_node // length)
        rows = static_rows if batch_grows else instance.global_batch // replicas
        count = MICROBATCHES if length > 1 else 4
        computed = frozen - before if cached else frozen
        step = pipeline_step(instance.num_blocks - frozen, length, count, rows)
        step += computed * Fraction(rows, TIMED_ROWS)
        total += step * Fraction(instance.global_batch, rows * replicas)
        before = frozen
    return len(instance.frozen_blocks()) * static / total


def work_ratio(instance: Instance, *, advances: bool) -> Fraction:
    """Return the work of an unfrozen run over that of the frozen one.

    Args:
        instance: Of which model and schedule.
        advances: Whether each block's one forward per sample, when it freezes, counts.
    """
    frozen = instance.frozen_blocks()
    whole = WORK * instance.num_blocks * len(frozen)
    left = WORK * sum(instance.num_blocks - blocks for blocks in frozen)
    return Fraction(whole, left + (frozen[-1] if advances else 0))


def bound(instance: Instance) -> Fraction:
    """Return the most over the static pipeline: no bubbles, free cache reads."""
    bubble = Fraction(MICROBATCHES + STATIC_LENGTH - 1, MICROBATCHES)
    return work_ratio(instance, advances=False) * bubble


def closed_forms(instance: Instance) -> dict[str, float]:
    """Return all of these, by name."""
    return {
        "freezing only": float(left_in_stages(instance)),
        "freezing only, serial prefix": float(
            paper_system(instance, cached=False, batch_grows=False, shrinks=False)
        ),
        "paper": float(paper_system(instance, cached=False, batch_grows=True)),
        "paper with cache": float(
            paper_system(instance, cached=True, batch_grows=False)
        ),
        "bound": float(bound(instance)),
        "work ratio": float(work_ratio(instance, advances=False)),
        "work ratio with advance forwards": float(work_ratio(instance, advances=True)),
    }
