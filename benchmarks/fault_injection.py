r"""Injected faults: a fault at a point of a run, to one process, and how all end.

python benchmarks/fault_injection.py --policy raise \
    --json benchmarks/results/fault_injection.json
python benchmarks/fault_injection.py --only 'in move' --repeats 20 --verbose

Each case is a whole run of 2 to 4 processes over a small model, which freezes and
unfreezes: its plans are forced. A process strikes itself, another one, or the process
that serves the store, when it comes to the point of the case; repeated cases up to
50 ms later. Judged, under both policies: nobody hangs; every survivor ends in a way
that is named as right for the case, in time, and blames who it was; every rank that
finished trained each sample once and holds the weights of an undisturbed run; every
checkpoint that was due is there, loads, and is a state of that run. METRICS.md says
what is timed. The status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.case import DRIFTING, Case, Kind, Moment, Policy
from faults.checks import SLACK_S, Attempt, Verdict, judge, struck_in_time
from faults.drive import HANG_S, run_case, run_undisturbed
from faults.places import mounts_refused
from faults.report import case_rows, document, summary
from faults.small_run import Deadlines
from faults.table import cases
from faults.trace import Reference
from harness.forked import fork_server
from harness.provenance import begin
from harness.results import write_json

NAMES = {"raise": "fault_injection", "continue": "fault_injection_continue"}
QUICK_CASES = 3
MOST_DELAY_S = 0.05
MOST_MISSES = 3
MOUNTS = ("full disk",)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", choices=sorted(NAMES), default="raise")
    add("--json", type=Path, metavar="PATH", help="write the figures here, and a .md")
    add("--quick", action="store_true", help=f"{QUICK_CASES} cases")
    add("--limit", type=int, help="that many cases, drawn by --seed")
    add("--repeats", type=int, default=1, help="attempts at each case")
    add("--seed", type=int, default=0)
    add("--only", help="cases whose name contains this")
    add("--jobs", type=int, default=2, help="cases side by side")
    add("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    add("--protocol", type=float, default=5.0, help="timeout in seconds")
    add("--slack", type=float, default=SLACK_S, help="seconds beyond the timeouts")
    add("--hang", type=float, default=HANG_S, help="seconds until a rank hangs")
    add("--verbose", action="store_true", help="show the logs of failed cases")
    return parser.parse_args(arguments)


def chosen(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for."""
    found = [c for c in cases(args.policy) if args.only is None or args.only in c.name]
    limit = QUICK_CASES if args.quick else args.limit
    if limit is not None and limit < len(found):
        picked = random.Random(args.seed).sample(range(len(found)), limit)
        found = [found[i] for i in sorted(picked)]
    return found


def moment_of(case: Case, number: int, seed: str, reference: Reference) -> Moment:
    """Return when an attempt strikes: the first at the point, others a little later.

    In every second of these the process goes on meanwhile, where the fault can come
    from outside; else it stays at the point, so that the others' places differ. In a
    transfer each attempt strikes at a moment of its own.
    """
    draw = random.Random(f"{seed} {case.name} {number}")
    if case.point == "in transfer":
        moves_s = reference.move_s[case.rank]
        return Moment(draw.uniform(0.1, 0.6) * moves_s, drifts=True)
    if number == 0:
        return Moment()
    drifts = case.fault in DRIFTING and case.victims and case.point != "at finish"
    return Moment(
        draw.uniform(0, MOST_DELAY_S), drifts=bool(drifts) and number % 2 == 1
    )


def reference_kind(case: Case, policy: Policy) -> Kind:
    """Return the undisturbed run that a case is compared with.

    Without a store no plan changes any more, so what is frozen then stays frozen.
    """
    if policy == "raise" or not case.outlives_store:
        return case.kind
    return dataclasses.replace(case.kind, stays_at=case.plan_in_force)


def run_all(args: argparse.Namespace, wanted: Sequence[Case]) -> list[Verdict]:
    """Run the undisturbed runs first, then the cases, several side by side."""
    deadlines = Deadlines(heartbeat=args.heartbeat, protocol=args.protocol)
    policy: Policy = args.policy
    refused = mounts_refused() if any(c.fault in MOUNTS for c in wanted) else ""
    kinds = {case: reference_kind(case, policy) for case in wanted}
    with tempfile.TemporaryDirectory() as folder:
        references = {}
        for number, kind in enumerate(dict.fromkeys(kinds.values())):
            references[kind] = run_undisturbed(
                kind, policy, deadlines, Path(folder, str(number)), args.hang
            )
        one = functools.partial(_one, args, kinds, references, refused)
        attempts = [(c, number) for c in wanted for number in range(args.repeats)]
        with ThreadPoolExecutor(args.jobs) as pool:
            return list(pool.map(one, attempts))


def _one(
    args: argparse.Namespace,
    kinds: Mapping[Case, Kind],
    references: Mapping[Kind, Reference],
    refused: str,
    wanted: tuple[Case, int],
) -> Verdict:
    case, number = wanted
    if refused and case.fault in MOUNTS:
        return Verdict(case, (), "skipped", None, why=refused, skipped=True)
    reference = references[kinds[case]]
    deadlines = Deadlines(heartbeat=args.heartbeat, protocol=args.protocol)
    try:
        for again in range(MOST_MISSES):  # it may come too late for a short transfer
            seed = f"{args.seed}-{again}"
            moment = moment_of(case, number, seed, reference)
            trace = run_case(case, moment, args.policy, deadlines, hang_s=args.hang)
            if struck_in_time(case, trace):
                break
        attempt = Attempt(case, args.policy, moment, deadlines, args.slack, trace)
        verdict = judge(attempt, reference)
    except Exception:
        return Verdict(case, (traceback.format_exc(),), "not judged", None)
    _report(verdict, moment)
    if verdict.problems and args.verbose:
        print(trace.hung, trace.errors, *trace.logs, sep="\n", flush=True)
    return verdict


def _report(verdict: Verdict, moment: Moment) -> None:
    seconds = "-" if verdict.seconds is None else f"{verdict.seconds:.2f} s"
    later = f" {moment.delay_s * 1e3:+.0f} ms" if moment.delay_s else ""
    line = f"{verdict.case.name}{later}: {verdict.outcome}, {seconds}"
    print("\n  ".join([line, *(f"PROBLEM {p}" for p in verdict.problems)]), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("faults.worker", "faults.drive")
    verdicts = run_all(args, chosen(args))
    settings = {
        "heartbeat timeout": f"{args.heartbeat:g} s",
        "protocol timeout": f"{args.protocol:g} s",
        "slack": f"{args.slack:g} s",
        "attempts at each case": args.repeats,
        "cases side by side": args.jobs,
    }
    text = document(verdicts, args.policy, settings)
    print(text.partition("\n\n| point")[0])
    if args.json is not None:
        write_json(
            args.json,
            NAMES[args.policy],
            [],
            [],
            start=start,
            quick=args.quick or args.limit is not None or args.only is not None,
            policy=args.policy,
            settings=settings,
            summary=summary(verdicts),
            cases=case_rows(verdicts),
        )
        args.json.with_suffix(".md").write_text(text)
    failed = [v for v in verdicts if v.problems]
    skipped = [v for v in verdicts if v.skipped]
    for verdict in skipped:
        print(f"skipped: {verdict.case.name}: {verdict.why}")
    print(f"{len(verdicts)} attempts, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or len(verdicts) == len(skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
