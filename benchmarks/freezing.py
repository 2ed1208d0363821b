"""What freeze policies cost in accuracy and save in work, paired over seeds.

python benchmarks/freezing.py --json benchmarks/results/freezing.json

Each task is fine-tuned under each policy and unfrozen: same weights, same head, same
batches, same number of steps, in one process by the engine. Tasks differ in what there
is left to learn: digits with a vision transformer that was pre-trained on all of the
samples, on a part, or on half of the classes only; digits whose labels change half-way;
SST-2 and XQuAD with MiniLM, and SST-2 from random weights.

A policy passes where it is not worse than unfrozen by more than the margin: one-sided
95 % limit of the paired differences, `MARGINS` points. "Work" is counted in forwards of
one block for one row (a trained row counts 3), the unfrozen run's over the policy's:
reading the cache is no work. How many seeds a margin needs follows from the spread of
the differences; the table tells it for a power of 80 %.

Finished runs are kept in build/ and not made again for the same commit. What takes
longer than a sitting goes on from its own figures (`--minutes`), which tell the commit
of each run: those of a seed have one, seeds may have different ones, between which
nothing has changed that decides what a run learns (`DECIDES`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from scipy import stats

from harness.age import age
from harness.common import Row, RunFailed, Target, begin, run_child, write_json
from harness.paired import non_inferiority
from harness.provenance import Start, command, tree_of
from harness.text import text_table
from real_models import ROOT, unpack_model

WORKER = ROOT / "benchmarks" / "training" / "freezing_worker.py"
DIGITS = (
    "digits",
    "digits 80 %",
    "digits 50 %",
    "digits, half of the classes",
    "digits, labels change",
)
WATCHING = "guarded, held-out loss"  # only where there is a set for it: SST-2
TEXT = ("sst2 1024", "sst2 1024, random weights", "sst2", "xquad")
POLICIES = (
    "cap 1/5",
    "cap 1/3",
    "cap 1/2",
    "gradient",
    "autofreeze",
    "plasticity",
    "guarded",
    WATCHING,
)
MARGINS = {"digits": 0.3, "sst2": 0.5, "xquad": 0.5}
UNFROZEN = "unfrozen"
_FIGURES = ("score", "work", "evaluations", "frozen", "losses", "held_out", "curve")
_PUBLISHED = ("seed", "commit", "same_as", *_FIGURES)
DECIDES = (
    "pipetransformer/autofreeze",
    "csrc/autofreeze",
    "benchmarks/training/freezing_worker.py",
    "benchmarks/training/text_worker.py",
    "benchmarks/training/work.py",
    "examples/text_classification.py",
    "examples/vit_digits.py",
)
_SHARES = (10, 20, 30, 40, 60, 80, 100)  # of the unfrozen run's work, in percent
POWER = 0.8


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="two epochs; not for publication")
    add("--data", type=Path, default=ROOT.parent / "shared" / "data")
    add("--tasks", nargs="+", choices=(*DIGITS, *TEXT), default=list(DIGITS))
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES[:-1]))
    add("--seeds", type=int, default=20, help="how many")
    add("--first-seed", type=int, default=0)
    add("--curves", action="store_true", help="scores by the work done, and no tests")
    add("--jobs", type=int, default=1, help="seeds made at a time, a core each")
    add(
        "--minutes",
        type=float,
        help="of a task; begin no seed after them, and add to what --json has",
    )
    args = parser.parse_args(arguments)
    bare = [task for task in args.tasks if not task.startswith("sst2")]
    if WATCHING in args.policies and bare:
        parser.error(f"{WATCHING}: expected tasks of SST-2, got {', '.join(bare)}")
    if args.quick:
        args.seeds, args.tasks, args.policies = 2, ["digits"], ["guarded"]
    return args


Runs: TypeAlias = dict[str, list[dict[str, Any]]]
"""The runs of a task by policy, in the order of their seeds."""


def made_runs(
    args: argparse.Namespace,
    folder: Path,
    model: Path,
    begun: dict[str, Runs],
    commit: str | None,
) -> tuple[dict[str, Runs], bool]:
    """Make the runs that are missing; return all of them by task.

    Args:
        args: Of the command line.
        folder: For the files of the runs.
        model: The unpacked model.
        begun: Runs of earlier sittings by task.
        commit: Of this one.

    Returns:
        The runs, and whether any was missing.
    """
    names = [UNFROZEN, *args.policies]
    found, any_missing = {}, False
    wanted = range(args.first_seed, args.first_seed + args.seeds)
    for task in args.tasks:
        whole = whole_seeds(begun.get(task, {}), names)
        whole = {seed: whole[seed] for seed in wanted if seed in whole}
        missing = [seed for seed in wanted if seed not in whole]
        any_missing = any_missing or bool(missing)
        line = [sys.executable, str(WORKER), "--task", task, "--out", str(folder)]
        line += ["--policies", *names, "--seeds", *map(str, missing)]
        line += ["--model", str(model), "--data", str(args.data)]
        line += ["--jobs", str(args.jobs), "--proof-seed", str(args.first_seed)]
        line += [] if args.minutes is None else ["--minutes", str(args.minutes)]
        line += ["--quick"] if args.quick else []
        line += ["--curves"] if args.curves else []
        if missing:
            run_child(line, timeout_s=36_000, log=folder / f"{task}.log")
        for seed in missing:
            files = [_file_of(folder, task, name, seed) for name in names]
            if args.minutes is None or all(map(os.path.exists, files)):
                of_seed = {"seed": seed, "commit": commit}
                whole[seed] = [{**json.loads(f.read_text()), **of_seed} for f in files]
        by_seed = [whole[seed] for seed in sorted(whole)]
        found[task] = {
            name: [runs[n] for runs in by_seed] for n, name in enumerate(names)
        }
    return found, any_missing


def whole_seeds(runs: Runs, names: Sequence[str]) -> dict[int, list[dict[str, Any]]]:
    """Return the runs, one for each name, of every seed that has them all.

    What commits have changed since counts as not there.
    """
    commits = {run.get("commit") for of_name in runs.values() for run in of_name}
    good = {c for c in commits if c and age(ROOT, c, DECIDES).newer == 0}
    by_name = [
        {run["seed"]: run for run in runs.get(name, ()) if run.get("commit") in good}
        for name in names
    ]
    seeds = set(by_name[0]).intersection(*by_name[1:])
    whole = {seed: [runs_of[seed] for runs_of in by_name] for seed in seeds}
    return {
        seed: found
        for seed, found in whole.items()
        if len({run["commit"] for run in found}) == 1
    }


def _file_of(folder: Path, task: str, name: str, seed: int) -> Path:
    return folder / f"{task}, {name}, {seed}.json".replace("/", "-")


def _begun(args: argparse.Namespace) -> dict[str, Runs]:
    """Return the runs of earlier sittings of this command."""
    if args.minutes is None or args.json is None or not args.json.exists():
        return {}
    content = json.loads(args.json.read_text())
    if content["command"] != command() or content["dirty"] is not False:
        return {}
    runs: dict[str, Runs] = content["runs"]
    return runs


def _refused(args: argparse.Namespace, start: Start) -> str | None:
    """Say why a sitting's runs could not be told from those of other commits."""
    if args.minutes is None:
        return None
    if start.tree.commit is None or start.tree.changed:
        return "--minutes: expected a tree as committed, got another"
    if tree_of(ROOT) != start.tree:
        kept = f"build/freezing/{start.tree.commit}"
        return f"the tree was changed meanwhile: nothing is written, remove {kept}"
    return None


def seeds_needed(differences: Sequence[float], margin: float) -> int:
    """Return the seeds that show no loss of `margin` with the power `POWER`.

    For a policy whose true mean difference is 0, by the normal approximation of the
    paired one-sided test at 95 %; at least 2.
    """
    spread = statistics.stdev(differences)
    quantiles = float(stats.norm.ppf(0.95) + stats.norm.ppf(POWER))
    needed: float = (quantiles * spread / margin) ** 2
    return max(2, int(-(-needed // 1)))


def _with_evaluations(
    system: str, base: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]
) -> list[Row]:
    """Return the work of a policy that looks at a held-out set, with that."""
    if not any(run["evaluations"] for run in own):
        return []
    work = tuple(
        one["work"] / (other["work"] + other["evaluations"])
        for one, other in zip(base, own, strict=True)
    )
    return [
        Row(system, "the same with its evaluations", "times", work, values_of="seeds")
    ]


def curves_of(
    task: str, runs: dict[str, list[dict[str, Any]]]
) -> tuple[list[Row], list[list[str]]]:
    """Return each policy's score by the work done, and lines for the terminal.

    Work is a share of what the unfrozen run of the same seed does in all; the score is
    that after the last epoch which is done by then, a finished run's stays.
    """
    rows, lines = [], []
    whole = [run["work"] for run in runs[UNFROZEN]]
    for name, each in runs.items():
        told = []
        for share in _SHARES:
            reached = [
                [score for work, score in run["curve"] if 100 * work <= share * all_of]
                for run, all_of in zip(each, whole, strict=True)
            ]
            if not all(reached):
                told.append("-")
                continue
            scores = tuple(found[-1] for found in reached)
            metric = f"with {share} % of the work"
            rows.append(Row(f"{task}, {name}", metric, "%", scores, values_of="seeds"))
            told.append(f"{statistics.fmean(scores):.2f}")
        lines.append([task, name, *told])
    return rows, lines


def rows_of(
    task: str, runs: dict[str, list[dict[str, Any]]]
) -> tuple[list[Row], list[list[str]]]:
    """Return the figures of one task, and lines for the terminal."""
    margin = next(m for name, m in MARGINS.items() if task.startswith(name))
    base = runs[UNFROZEN]
    scores = tuple(run["score"] for run in base)
    rows = [Row(f"{task}, {UNFROZEN}", "score", "%", scores, values_of="seeds")]
    lines = [[task, UNFROZEN, f"{statistics.fmean(scores):.2f}", "-", "-", "1.00", "-"]]
    for name, each in runs.items():
        if name == UNFROZEN:
            continue
        test = non_inferiority(
            [run["score"] for run in each],
            [run["score"] for run in base],
            margin=margin,
        )
        work = tuple(
            one["work"] / other["work"] for one, other in zip(base, each, strict=True)
        )
        system = f"{task}, {name}"
        needed = seeds_needed(test.differences, margin)
        rows += [
            Row(system, "mean difference", "points", (test.mean,), values_of="runs"),
            Row(
                system,
                "lower limit",
                "points",
                (test.lower_limit,),
                values_of="runs",
                target=Target(-margin, at_least=True),
            ),
            Row(
                system,
                "work of unfrozen over its own",
                "times",
                work,
                values_of="seeds",
            ),
            *_with_evaluations(system, base, each),
            Row(system, "seeds needed", "seeds", (float(needed),), values_of="runs"),
        ]
        lines.append(
            [
                task,
                name,
                f"{statistics.fmean(run['score'] for run in each):.2f}",
                f"{test.mean:+.2f}",
                f"{test.lower_limit:+.2f} {'passes' if test.passes else 'FAILS'}",
                f"{statistics.fmean(work):.2f}",
                str(needed),
            ]
        )
    return rows, lines


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    if refused := _refused(args, start):
        print(refused, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if start.tree.commit and not start.tree.changed and not args.quick:
            kind = "freezing_curves" if args.curves else "freezing"
            folder = ROOT / "build" / kind / start.tree.commit
            folder.mkdir(parents=True, exist_ok=True)
        real = any(task in TEXT for task in args.tasks)
        model = unpack_model(Path(name) / "model") if real else Path(name)
        try:
            begun, commit = _begun(args), start.tree.commit
            found, is_new = made_runs(args, folder, model, begun, commit)
        except (RunFailed, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    rows, lines = [], []
    for task, runs in found.items():
        seeds = len(runs[UNFROZEN])
        if seeds < args.seeds:
            print(f"{task}: {seeds} of {args.seeds} seeds so far")
        if seeds < 2:
            continue  # one tells no spread
        more_rows, more_lines = (curves_of if args.curves else rows_of)(task, runs)
        rows += more_rows
        lines += more_lines
    figures = ["score", "difference", "limit", "work", "seeds needed"]
    if args.curves:
        figures = [f"{share} %" for share in _SHARES]
    print(text_table(["task", "policy", *figures], lines))
    if refused := _refused(args, start):
        print(refused, file=sys.stderr)
        return 1
    if args.json is not None and is_new:
        write_json(
            args.json,
            args.json.stem,  # one command has all policies, another one more seeds
            rows,
            [],
            start=start,
            quick=args.quick,
            first_seed=args.first_seed,
            seeds=args.seeds,
            seeds_so_far={task: len(runs[UNFROZEN]) for task, runs in found.items()},
            commits=sorted(
                {str(r["commit"]) for runs in found.values() for r in runs[UNFROZEN]}
            ),
            margins=MARGINS,
            runs={
                task: {
                    name: [{k: run[k] for k in _PUBLISHED if k in run} for run in each]
                    for name, each in runs.items()
                }
                for task, runs in found.items()
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
