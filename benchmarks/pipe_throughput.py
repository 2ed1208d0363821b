"""How close the pipeline comes to what its schedule allows, alongside its rivals.

python benchmarks/pipe_throughput.py --json benchmarks/results/pipe_throughput.json

A 12-block encoder trains on one batch: plain in one thread, in our pipeline on two CPU
slots under each schedule, in ``torch.distributed.pipelining`` with two processes, and
under DDP with two processes. The batch is the same for all. The systems take turns; the
processes stay and sleep while others are timed. Prints speed-ups over one thread
next to K*M/(M+K-1), ZB-H1's alongside 3KM/(3M+K-1), and the activations kept. ``--pipe
MODULE:ATTR`` puts another pipeline alongside ours, called as
``attr(model, num_stages=K, chunks=M, checkpoint="never")``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence

import torch

from harness.child import foreign_cpu_s, machine_busy_s
from harness.common import (
    Ratio,
    Repeat,
    Row,
    Sample,
    Series,
    Target,
    add_common_arguments,
    begin,
    compared,
    interleave,
    write_json,
)
from harness.rank_pool import RankPool
from harness.text import text_table
from pipe.bounds import one_f_one_b_saved_share
from pipe.encoder import Shape, batch
from pipe.live_bytes import LiveBytes
from pipe.pipes import DISPATCHES
from pipe.rank_systems import RankSystems
from pipe.throughput_systems import (
    ONE_THREAD,
    OUR_SCHEDULES,
    RIVAL_OF,
    Maker,
    System,
)

STEP, SAVED = "step time", "peak saved"
SHAPE = Shape()
QUICK_SHAPE = Shape(tokens=64, rows=8)
TIMEOUT_S = 60.0
# Of the formula, in training without recomputation; and ahead of the rival.
LEAST_SHARES = {"gpipe": 0.97, "1f1b": 0.97, "zb-h1": 0.95}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=10)
    add = parser.add_argument
    add("--slots", type=int, default=2, help="K; divides the 12 blocks")
    add("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="M")
    add("--schedules", nargs="*", choices=OUR_SCHEDULES, default=list(OUR_SCHEDULES))
    add("--steps", type=int, default=1, help="of one repeat")
    add("--dispatch", choices=DISPATCHES, default="auto")
    add("--no-modes", action="store_false", dest="modes", help="only `never`, training")
    add("--no-processes", action="store_true", help="leave the process systems out")
    add("--pipe", metavar="MODULE:ATTR", help="another pipeline alongside ours")
    args = parser.parse_args()
    if SHAPE.blocks % args.slots:
        parser.error(f"--slots: expected a divisor of 12, got {args.slots}")
    if args.quick:
        args.repeats, args.steps, args.microbatches = 1, 1, args.microbatches[-1:]
    return args


def runner(
    args: argparse.Namespace, systems: Mapping[str, System], ranks: RankPool | None
) -> Callable[[str, int], Repeat]:
    """Return what times a system's steps once."""

    def here(step: Callable[[], None]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            step()
        return time.perf_counter() - wall, time.process_time() - cpu

    def run(name: str, turn: int) -> Repeat:
        system, busy = systems[name], machine_busy_s()
        if system.step is not None:
            wall_s, cpu_s = here(system.step)
        else:
            assert ranks is not None
            command = ("run", system.kind, system.microbatches, args.steps)
            times = ranks.call(*command)
            wall_s, cpu_s = max(t[0] for t in times), sum(t[1] for t in times)
        foreign = foreign_cpu_s(busy, machine_busy_s(), wall_s, cpu_s)
        return Repeat(Sample(wall_s, cpu_s, foreign), {STEP: wall_s / args.steps})

    return run


def alongside(system: System, names: Container[str]) -> tuple[str, ...]:
    """Return what a pipeline is compared with at the same M: one thread, a rival."""
    if system.measure != ONE_THREAD:
        return ()
    kinds = (ONE_THREAD, RIVAL_OF.get(system.kind))
    found = tuple(f"{kind} M={system.microbatches}" for kind in kinds)
    return tuple(name for name in found if name in names and name != system.name)


def speedups(
    args: argparse.Namespace, systems: Sequence[System], rows: Mapping[str, Row]
) -> list[Ratio]:
    """Return each system's speed-up over one thread, and over others of its M."""
    found: list[Ratio] = []
    for system in systems:
        name = system.name
        for measure in (system.measure, *alongside(system, rows)):
            if measure != name:
                found += compared(
                    f"{name} / {measure}",
                    rows[measure],
                    rows[name],
                    better_than=measure,
                    quick=args.quick,
                    target=target(system, measure),
                )
    return found


def target(system: System, measure: str) -> Target | None:
    """Return what one of our schedules is to reach: its formula's share, its rival."""
    share = LEAST_SHARES.get(system.kind)
    if share is None or system.bound is None:
        return None
    if measure == system.measure:
        return Target(share * system.bound, at_least=True, of="value")
    if measure == f"{RIVAL_OF[system.kind]} M={system.microbatches}":
        return Target(1.0, at_least=True, of="value")
    return None


def saved_rows(
    args: argparse.Namespace, shape: Shape, systems: Sequence[System]
) -> list[Row]:
    """Return the bytes that graphs keep at most in a step, for systems in here."""
    found = []
    for system in systems:
        if system.step is None or system.model is None:
            continue
        known = [*system.model.parameters(), *batch(shape, args.seed)]
        peaks = []
        for _ in range(max(1, min(3, args.repeats))):
            live = LiveBytes(known)
            with live.counting():
                system.step()
            peaks.append(live.peak / 2**20)
        found.append(Row(system.name, SAVED, "MiB", tuple(peaks)))
    return found


def print_table(
    systems: Sequence[System],
    rows: Mapping[str, Row],
    ratios: Sequence[Ratio],
    saved: Mapping[str, Row],
) -> None:
    """Print one line per system."""
    values = {each.name: each.value for each in ratios}

    def cell(system: System, measure: str) -> str:
        value = values.get(f"{system.name} / {measure}")
        return "-" if value is None else f"{value:.3f}"

    lines = []
    for system in systems:
        row, bound, kept = rows[system.name], system.bound, saved.get(system.name)
        told = values.get(f"{system.name} / {system.measure}")
        lines.append(
            [
                system.name,
                f"{row.median:.3f}" if row.values else "failed",
                cell(system, system.measure),
                f"{bound:.3f}" if bound else "-",
                f"{told / bound:.1%}" if told and bound else "-",
                cell(system, f"{ONE_THREAD} M={system.microbatches}"),
                cell(system, f"{RIVAL_OF.get(system.kind)} M={system.microbatches}"),
                f"{kept.median:.1f}" if kept else "-",
            ]
        )
    headers = ["system", "s", "x one thread", "formula", "share", "x same M"]
    headers += ["x pipelining", "MiB kept"]
    print(text_table(headers, lines))


def main() -> int:
    args = parse_args()
    start = begin()
    torch.set_num_threads(1)
    shape = QUICK_SHAPE if args.quick else SHAPE
    systems = Maker(args, shape).all()
    by_name = {system.name: system for system in systems}
    ranks = None
    if not args.no_processes:
        ranks = RankPool(RankSystems, args.slots, shape, args.seed, timeout_s=TIMEOUT_S)
    try:
        series = interleave(
            list(by_name), runner(args, by_name, ranks), repeats=args.repeats
        )
    finally:
        if ranks is not None:
            ranks.close()
    rows = {name: each.row(STEP, "s") for name, each in series.items()}
    ratios = speedups(args, systems, rows)
    saved = saved_rows(args, shape, systems)
    print_table(systems, rows, ratios, {row.system: row for row in saved})
    failed = print_failures(series)
    if args.json is not None:
        write_json(
            args.json,
            "pipe_throughput",
            [*rows.values(), *saved],
            ratios,
            start=start,
            quick=args.quick,
            slots=args.slots,
            microbatches=args.microbatches,
            dispatch=args.dispatch,
            seed=args.seed,
            shape=vars(shape),
            measures={s.name: s.measure for s in systems},
            bounds={s.name: s.bound for s in systems if s.bound},
            saved_share_of_1f1b={
                str(m): one_f_one_b_saved_share(args.slots, m)
                for m in args.microbatches
            },
        )
    return int(failed)


def print_failures(series: Mapping[str, Series]) -> bool:
    """Print what failed; whether anything did."""
    for name, each in series.items():
        for failure in each.failures:
            print(f"{name} failed: {failure}", file=sys.stderr)
    return any(each.failures for each in series.values())


if __name__ == "__main__":
    sys.exit(main())
