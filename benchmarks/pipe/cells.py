"""Times the cells of a pipeline of tiny stages, and of the plain loop alongside it."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.common import Repeat, Row, Series, interleave, measured
from harness.text import text_table
from pipe.pipes import recomputed_share, tensor_of

LOOP = "loop"
WIDTH = 8
ROWS = 4  # of a micro-batch
FORWARD, BACKWARD = "forward_us_per_cell", "backward_us_per_cell"
FORWARD_ABOVE = "forward_overhead_us_per_cell"
BACKWARD_ABOVE = "backward_overhead_us_per_cell"
UNIT = "us"
CPU = torch.device("cpu")
# How many cores threads with so little work keep busy says nothing about a
# disturbance; the medians over iterations and repeats cope with short ones.
TOLERANCE = 0.9

Call = Callable[[Tensor], Any]
Rows = Mapping[tuple[str, str], Row]


@dataclass(frozen=True)
class System:
    """What is called, its checkpoint mode (None for the loop), and what it trains."""

    call: Call
    mode: str | None
    model: nn.Sequential


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's cycle collector from running in the middle of a call."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def runner(
    args: argparse.Namespace,
    systems: Mapping[str, System],
    device: torch.device = CPU,
) -> Callable[[str, int], Repeat]:
    """Return what runs a system's iterations of one repeat.

    On a GPU the host's time is taken; the device is idle when the clock starts.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    rows = torch.randn(ROWS * args.microbatches, WIDTH, device=device)
    ones = torch.ones_like(rows)
    cells = args.stages * args.microbatches

    def run(name: str, turn: int) -> Repeat:
        system = systems[name]
        times: dict[str, list[float]] = {FORWARD: [], BACKWARD: []}

        def iterate() -> None:
            for _ in range(args.iterations):
                system.model.zero_grad()  # to None: a first gradient is not added
                wait()
                start = time.perf_counter()
                outputs = tensor_of(system.call(rows))
                times[FORWARD].append(time.perf_counter() - start)
                wait()
                start = time.perf_counter()
                outputs.backward(ones)  # type: ignore[no-untyped-call]
                times[BACKWARD].append(time.perf_counter() - start)
                del outputs  # freed in no system's time

        with no_collections():
            sample = measured(iterate)
        return Repeat(
            sample,
            {
                metric: 1e6 * statistics.median(values) / cells
                for metric, values in times.items()
            },
        )

    return run


def overheads(
    name: str, series: Mapping[str, Series], share: float
) -> tuple[Row, Row, Row]:
    """Return a system's rows above the loop, pair by pair of repeats.

    A recomputed forward is work and no overhead: the loop's forward of the cells that
    are recomputed counts as the loop's backward.

    Args:
        name: The system.
        series: All repeats; those of the same number are pairs.
        share: See `recomputed_share`.

    Returns:
        Forward, backward, and both together. Dropped repeats stand in the rows from
        which these are taken.
    """
    own_forward, own_backward, forward, backward = (
        series[system].row(metric, UNIT)
        for system in (name, LOOP)
        for metric in (FORWARD, BACKWARD)
    )
    turns = sorted(own_forward.by_turn().keys() & forward.by_turn().keys())

    def row(metric: str, value: Callable[[int], float]) -> Row:
        values = tuple(value(turn) for turn in turns)
        return Row(
            name,
            metric,
            UNIT,
            values,
            turns=tuple(turns),
            failed=own_forward.failed,
            foreign_share=own_forward.foreign_share,
        )

    def above_forward(turn: int) -> float:
        return own_forward.by_turn()[turn] - forward.by_turn()[turn]

    def above_backward(turn: int) -> float:
        loop = backward.by_turn()[turn] + share * forward.by_turn()[turn]
        return own_backward.by_turn()[turn] - loop

    return (
        row(FORWARD_ABOVE, above_forward),
        row(BACKWARD_ABOVE, above_backward),
        row("overhead_us_per_cell", lambda k: above_forward(k) + above_backward(k)),
    )


def measure_cells(
    args: argparse.Namespace,
    systems: Mapping[str, System],
    device: torch.device = CPU,
) -> list[Row]:
    """Run all systems in turn and return their rows, those above the loop included.

    Args:
        args: ``repeats``, ``iterations``, ``stages`` and ``microbatches``.
        systems: By name; one of them is the loop.
        device: Of the batch.
    """
    gc.freeze()  # so that the collections between the repeats are short
    series = interleave(
        list(systems),
        runner(args, systems, device),
        repeats=args.repeats,
        tolerance=TOLERANCE,
    )
    found = [
        each.row(metric, UNIT)
        for each in series.values()
        for metric in (FORWARD, BACKWARD)
    ]
    for name, system in systems.items():
        if system.mode is not None:
            share = recomputed_share(system.mode, args.microbatches)
            found += overheads(name, series, share)
    return found


def print_table(
    systems: Mapping[str, System],
    rows: Rows,
    published: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Print medians and, in brackets, the ranges."""
    metrics = (FORWARD, BACKWARD, FORWARD_ABOVE, BACKWARD_ABOVE)
    headers = ["us per cell", "forward", "backward", "forward above", "backward above"]
    lines = [
        [name, *(told(rows.get((name, metric))) for metric in metrics)]
        for name in systems
    ]
    for line in lines if published else ():
        line.append(", ".join(map(str, (published or {}).get(line[0], ("-",)))))
    if published:
        headers.append("Pipe of torch 2.3, above (another machine)")
    print(text_table(headers, lines))


def told(row: Row | None) -> str:
    """Return a row's median and range; a dash where there is none."""
    if row is None or not row.values:
        return "-"
    return f"{row.median:.2f} ({min(row.values):.2f} to {max(row.values):.2f})"
