r"""Injected faults: a fault at a point of a run, to one process, and how all end.

python benchmarks/fault_injection.py --policy raise \
    --json benchmarks/results/fault_injection.json
python benchmarks/fault_injection.py --only 'in move' --verbose

Each case is a whole run of 2 to 4 processes over a small model, which freezes and
unfreezes: its plans are forced. A process strikes itself, or the process that serves
the store, when it comes to the point of the case. Judged: nobody hangs; every
survivor ends as the failure policy says; no rank trains with other weights than those
of an undisturbed run; every checkpoint that is left is a state of that run; under
"continue" each sample counts once in every epoch. METRICS.md says what is timed. The
status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _fault_case import Case, Policy
from _fault_checks import Reference, Verdict, judge
from _fault_drive import HANG_S, run_case
from _fault_report import case_rows, document, summary
from _fault_table import cases
from _forked import fork_server
from _provenance import begin
from _results import write_json
from _small_run import Deadlines

NAMES = {"raise": "fault_injection", "continue": "fault_injection_continue"}
QUICK_CASES = 3


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", choices=sorted(NAMES), default="raise")
    add("--json", type=Path, metavar="PATH", help="write the figures here, and a .md")
    add("--quick", action="store_true", help=f"{QUICK_CASES} cases")
    add("--limit", type=int, help="that many cases, drawn by --seed")
    add("--seed", type=int, default=0)
    add("--only", help="cases whose name contains this")
    add("--jobs", type=int, default=2, help="cases side by side")
    add("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    add("--protocol", type=float, default=5.0, help="timeout in seconds")
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


def run_all(args: argparse.Namespace, wanted: Sequence[Case]) -> list[Verdict]:
    """Run the undisturbed runs first, then the cases, several side by side."""
    deadlines = Deadlines(heartbeat=args.heartbeat, protocol=args.protocol)
    policy: Policy = args.policy
    references = {}
    for kind in sorted({(case.between, case.world_size) for case in wanted}):
        trace = run_case(None, *kind, policy, deadlines, hang_s=args.hang)
        references[kind] = Reference.of(trace)

    def one(case: Case) -> Verdict:
        kind = case.between, case.world_size
        try:
            trace = run_case(case, *kind, policy, deadlines, hang_s=args.hang)
            verdict = judge(case, policy, trace, references[kind])
        except Exception:
            return Verdict(case, (traceback.format_exc(),), "not judged", None, 0)
        _report(verdict)
        if verdict.problems and args.verbose:
            print(trace.hung, trace.errors, *trace.logs, sep="\n", flush=True)
        return verdict

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(one, wanted))


def _report(verdict: Verdict) -> None:
    seconds = "-" if verdict.seconds is None else f"{verdict.seconds:.2f} s"
    line = f"{verdict.case.name}: {verdict.outcome}, {seconds}"
    print("\n  ".join([line, *(f"PROBLEM {p}" for p in verdict.problems)]), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("_fault_worker", "_fault_drive")
    verdicts = run_all(args, chosen(args))
    settings = {
        "heartbeat timeout": f"{args.heartbeat:g} s",
        "protocol timeout": f"{args.protocol:g} s",
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
    print(f"{len(verdicts)} cases, {len(failed)} failed")
    return 1 if failed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
