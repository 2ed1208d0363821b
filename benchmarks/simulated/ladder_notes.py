"""Why a row differs from what was expected: calculations, not opinions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulated.ladder_forms import WORK, work_ratio
from simulated.ladder_instance import TIMED_ROWS, Instance, Rates
from simulated.ladder_rows import (
    ANY_K,
    BEST_STATIC,
    FILLED,
    FITS_ONE,
    FULL,
    MAIN,
    OURS,
    OVER_BEST,
    SPREAD,
    STATIC,
    STATIC_BEST_M,
)
from simulated.ladder_steps import Ladder, Rung

# Of the instance and its rates; a ladder holds both.
Note = Callable[[Ladder], str]


def _speedup(ladder: Ladder, over: Rung, under: Rung) -> float:
    return ladder.total_ns(over) / ladder.total_ns(under)


def _any_k(ladder: Ladder) -> str:
    """Lengths that do not divide a node's devices leave some idle."""
    one_node = Ladder(Instance(num_nodes=1, devices_per_node=16), ladder.rates)
    gain = 100 * (_speedup(one_node, SPREAD, ANY_K) - 1)
    lengths = sorted({epoch.num_stages for epoch in one_node.epochs(ANY_K)})
    return (
        "no gain here: a pipeline stays within a node of 8 devices, so K = 3, 5, 6, 7 "
        f"leave 2, 3, 2, 1 of them idle. On one node of 16 the search takes K in "
        f"{lengths} and gains {gain:.1f} %"
    )


def _best_static(ladder: Ladder) -> str:
    """A plan that loses nothing is the most that can be expected."""
    instance, rates = ladder.instance, ladder.rates
    devices = instance.num_nodes * instance.devices_per_node
    rows = instance.global_batch / devices / TIMED_ROWS
    work_ns = WORK * instance.num_blocks * rows * rates.block_forward_ns
    pipeline_ns = ladder.epochs(STATIC_BEST_M)[0].time_ns
    single_ns = ladder.epochs(BEST_STATIC)[0].time_ns
    at_half = Ladder(instance, _halved_links(rates))
    return (
        f"static K=8 with best M takes {pipeline_ns / 1e6:.0f} ms a step, K=1 "
        f"{single_ns / 1e6:.0f} ms, of which {work_ns / 1e6:.0f} ms are its work: "
        f"even without any loss the ratio would be {pipeline_ns / work_ns:.2f}. More "
        "needs slower links, which only the pipeline feels: at half their rate it is "
        f"{_speedup(at_half, STATIC_BEST_M, BEST_STATIC):.2f}"
    )


def _halved_links(rates: Rates) -> Rates:
    link = rates.device_link_bytes_per_s
    return replace(rates, device_link_bytes_per_s=None if link is None else link // 2)


def _over_best_static(ladder: Ladder) -> str:
    """A quotient of two rows differs by what the two differ."""
    (first, second) = (line.expected or 0.0 for line in FITS_ONE.lines)
    best = _speedup(ladder, STATIC_BEST_M, BEST_STATIC)
    full = _speedup(ladder, STATIC_BEST_M, FULL)
    most = float(work_ratio(ladder.instance, advances=True))
    return (
        f"a quotient of the two rows before: expected {second}/{first} = "
        f"{second / first:.2f}, here {full:.2f}/{best:.2f} = {full / best:.2f}; the "
        f"best static plan makes {100 * (first / best - 1):+.1f} % of it, full "
        f"{100 * (full / second - 1):+.1f} %. The work ratio is {most:.2f}"
    )


def _ours(ladder: Ladder) -> str:
    """What the choice of the schedule is worth."""
    gpipe = replace(OURS, schedules=("gpipe",))
    values = (_speedup(ladder, STATIC, rung) for rung in (FILLED, gpipe, OURS))
    one_f_one_b, with_gpipe, free = values
    return (
        f"1F1B alone gives {one_f_one_b:.2f} (its all-reduce waits for the whole "
        f"step), GPipe alone {with_gpipe:.2f}, the planner's choice per epoch "
        f"{free:.2f}"
    )


NOTES: dict[tuple[str, str], Note] = {
    (MAIN.title, ANY_K.name): _any_k,
    (MAIN.title, OURS.name): _ours,
    (FITS_ONE.title, BEST_STATIC.name): _best_static,
    (OVER_BEST.title, FULL.name): _over_best_static,
}
