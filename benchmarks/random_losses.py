r"""Ranks are lost at random times, and those that are left go on.

python benchmarks/random_losses.py --json benchmarks/results/random_losses.json
python benchmarks/random_losses.py --losses 40 --seed 7

Runs of four processes over the small model, under ``on_peer_failure="continue"``. A
process of its own serves the store. One or two ranks at a time get SIGKILL or SIGSTOP,
drawn with their moment from ``--seed``, until up to three are gone: while the processes
start, while the run trains or changes plans, while the survivors of a loss go on, and
two within one heartbeat timeout. Stopped ranks are woken, a third of them while the
others train on.

Judged strictly, against an undisturbed run of the same kind: as long as a survivor
holds the training state the survivors finish, with the weights of that run after each
step and at the end, each sample once in every epoch, and a checkpoint of each epoch
that is a state of that run; who was stopped ends by itself. Runs that ended though the
state was held are printed. METRICS.md says what is timed. The status is 1 if a run is
not as promised.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from faults.loss_job import SIGNALS, Job, draw_job, run_job
from faults.loss_judge import (
    ENDED,
    NOT_OPEN,
    OVER,
    SLACK_S,
    STATE_LOST,
    WENT_ON,
    Loss,
    Reference,
    Verdict,
    judge,
)
from faults.loss_worker import KINDS, Kind
from faults.small_run import Deadlines
from harness.common import Row, begin, write_json
from harness.forked import fork_server

NAME = "random_losses"
LOSSES, QUICK_LOSSES = 500, 6
HANG_S = 120.0
OUTCOMES = (WENT_ON, STATE_LOST, NOT_OPEN, OVER, ENDED)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help=f"{QUICK_LOSSES} losses")
    add("--losses", type=int, default=LOSSES, help="ranks to strike, at least")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first run, to repeat it")
    add("--jobs", type=int, default=2, help="runs side by side")
    add("--heartbeat", type=float, default=3.0, help="timeout in seconds")
    add("--slack", type=float, default=SLACK_S, help="seconds beyond the deadlines")
    add("--hang", type=float, default=HANG_S, help="seconds until a rank hangs")
    add("--verbose", action="store_true", help="show the logs of failed runs")
    args = parser.parse_args(arguments)
    if args.losses < 1:
        parser.error(f"--losses: expected at least 1, got {args.losses}")
    if args.quick:
        args.losses = QUICK_LOSSES
    return args


class Campaign:
    """Runs until as many losses are judged as were asked for.

    Args:
        args: The options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._deadlines = Deadlines(
            heartbeat=args.heartbeat, protocol=30.0, store=10 * args.heartbeat
        )
        self._references: dict[Kind, Reference] = {}
        self._locks = {kind: threading.Lock() for kind in KINDS}

    def run(self) -> tuple[list[Verdict], list[str]]:
        """Return the verdicts, and tracebacks of what could not be judged."""
        verdicts: list[Verdict] = []
        failures: list[str] = []
        numbers = itertools.count(self._args.first)
        with ThreadPoolExecutor(self._args.jobs) as pool:
            running: set[Future[Verdict]] = set()
            while sum(len(v.losses) for v in verdicts) < self._args.losses:
                while len(running) < self._args.jobs:
                    running.add(pool.submit(self._one, next(numbers)))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    self._collect(future, verdicts, failures)
                if len(failures) > 2:
                    break
            for future in running:
                self._collect(future, verdicts, failures)
        return sorted(verdicts, key=lambda v: v.trace.job.number), failures

    def _one(self, number: int) -> Verdict:
        job = draw_job(self._args.seed, number, self._args.heartbeat)
        reference = self._reference(job.kind)
        trace = run_job(job, self._deadlines, self._args.hang)
        return judge(trace, reference, self._deadlines, self._args.slack)

    def _reference(self, kind: Kind) -> Reference:
        """Return the undisturbed run of a kind, made when it is first asked for."""
        with self._locks[kind]:
            if kind not in self._references:
                trace = run_job(Job(-1, kind, ()), self._deadlines, self._args.hang)
                self._references[kind] = Reference.of(trace)
            return self._references[kind]

    def _collect(
        self, future: Future[Verdict], verdicts: list[Verdict], failures: list[str]
    ) -> None:
        try:
            verdict = future.result()
        except Exception:
            failures.append(traceback.format_exc())
            print(failures[-1], flush=True)
            return
        verdicts.append(verdict)
        print(report(verdict), flush=True)
        if verdict.problems and self._args.verbose:
            trace = verdict.trace
            print(trace.hung, trace.errors, *trace.logs, sep="\n", flush=True)


def report(verdict: Verdict) -> str:
    """Return a run for people: its blows, and what is not as promised."""
    job = verdict.trace.job
    first = min((loss.strike.at for loss in verdict.losses), default=0.0)
    lines = [f"run {job.number}, {job.kind.name}:"]
    for loss in verdict.losses:
        strike = loss.strike
        lines.append(
            f"  +{strike.at - first:.1f} s rank {strike.rank} {strike.signal} in "
            f"{strike.place!r}: {loss.outcome} after {loss.seconds:.1f} s"
        )
    if verdict.fenced:
        lines.append(f"  too slow, and fenced: ranks {list(verdict.fenced)}")
    return "\n".join([*lines, *(f"  PROBLEM {text}" for text in verdict.problems)])


def record_of(verdict: Verdict, loss: Loss) -> dict[str, Any]:
    """Return one loss as plain values."""
    strike = loss.strike
    return {
        "run": verdict.trace.job.number,
        "kind": verdict.trace.job.kind.name,
        "rank": strike.rank,
        "signal": strike.signal,
        "phase": strike.place,
        "woken": strike.woken_at < math.inf,
        "outcome": loss.outcome,
        "seconds": loss.seconds if loss.seconds < math.inf else None,
    }


def rows(verdicts: Sequence[Verdict]) -> list[Row]:
    """Return the seconds until the survivors had gone on, by signal."""
    losses = [loss for v in verdicts for loss in v.losses if loss.outcome == WENT_ON]
    return [
        Row(
            name,
            "strike to all survivors in the next generation",
            "s",
            tuple(x.seconds for x in losses if x.strike.signal == name),
            values_of="lost ranks",
        )
        for name in SIGNALS
    ]


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """Return the number of losses by signal and outcome."""
    found = {
        name: Counter(
            loss.outcome
            for verdict in verdicts
            for loss in verdict.losses
            if loss.strike.signal == name
        )
        for name in SIGNALS
    }
    return {name: {o: count[o] for o in OUTCOMES} for name, count in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("faults.loss_worker", "faults.loss_job")
    verdicts, failures = Campaign(args).run()
    failed = [verdict for verdict in verdicts if verdict.problems]
    told = summary(verdicts)
    for name, counts in told.items():
        texts = [f"{count} {outcome}" for outcome, count in counts.items() if count]
        print(f"{name}: {', '.join(texts)}")
    for verdict in failed:
        print(f"FAILED\n{report(verdict)}")
    if args.json is not None and not failures:
        settings = {
            "heartbeat timeout": f"{args.heartbeat:g} s",
            "store timeout": f"{10 * args.heartbeat:g} s",
            "slack": f"{args.slack:g} s",
            "seed": args.seed,
            "runs side by side": args.jobs,
        }
        write_json(
            args.json,
            NAME,
            rows(verdicts),
            [],
            start=start,
            quick=args.quick,
            settings=settings,
            runs=len(verdicts),
            failed=len(failed),
            fenced=sum(len(verdict.fenced) for verdict in verdicts),
            summary=told,
            losses=[record_of(v, loss) for v in verdicts for loss in v.losses],
            problems=[
                f"run {v.trace.job.number}: {p}" for v in failed for p in v.problems
            ],
        )
    losses = sum(len(verdict.losses) for verdict in verdicts)
    print(f"{losses} losses in {len(verdicts)} runs, {len(failed)} runs failed")
    return 1 if failed or failures or not losses else 0


if __name__ == "__main__":
    sys.exit(main())
