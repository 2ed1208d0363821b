"""Whether predictions are true: four models, five shapes, frozen layers or none.

python benchmarks/step_prediction.py --json benchmarks/results/step_prediction.json
python benchmarks/step_prediction.py --memory --json FILE

Each run trains under one plan for three passes: K stages on R replicas, on K x R
processes, nothing frozen or half of the units, their activations cached; with K=1 also
all of them, and half that are run for every batch; of the first model also 1F1B and
ZB-H1 where nothing is frozen. The models:
the benchmarks' ViT; BERT with 6 layers on sentences of one length and of 6 to 48
tokens; BERT-base. What is measured is the mean step of the third pass.

* **before**: what layers alone would take, as plans were made at first: no optimizer,
  work of the process, all-reduce between processes, or cores that slots share;
* **first**: the prediction before the first step, by what is measured at the start;
* **learned**: the prediction for the third pass, by that and two passes.

**Aim** for the latter two: errors of at most 10 % in the median, and 25 % at worst.

With ``--memory`` the memory of the lead's process is compared with what the plan says
of its slots: the most that it holds in the second pass, less what it held before the
model was made. The C library is told to give back at once what is freed
(``MALLOC_MMAP_THRESHOLD_``), which a process of the user's does not do. **Aim**: each
within 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common import Row, Target, begin, run_child, write_json
from harness.provenance import Start
from harness.text import text_table

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "training" / "prediction_worker.py"
UNITS = {"vit": 12, "bert": 6, "bert ragged": 6, "bert-base": 12}
SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))
MEDIAN, WORST, MEMORY = 10.0, 25.0, 10.0  # %
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
KINDS = ("before", "first", "learned")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: Its name.
        stages: K.
        replicas: R.
        frozen: Units.
        cached: Whether their activations are.
        schedule: Of the plan.
    """

    model: str
    stages: int
    replicas: int
    frozen: int = 0
    cached: bool = True
    schedule: str = "gpipe"

    @property
    def what(self) -> str:
        """What kind of step it is."""
        if self.schedule != "gpipe":
            return self.schedule
        if not self.frozen:
            return "nothing frozen"
        part = "all" if self.frozen == UNITS[self.model] else "half"
        return f"{part} frozen, {'cached' if self.cached else 'run'}"

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.model}, {self.stages} x {self.replicas}, {self.what}"


def cases(quick: bool) -> Iterator[Case]:
    """Yield all cases; two with `quick`."""
    if quick:
        yield Case("vit", 1, 2)
        yield Case("vit", 2, 1, 6)
        return
    for model, units in UNITS.items():
        for stages, replicas in SHAPES:
            yield Case(model, stages, replicas)
            yield Case(model, stages, replicas, units // 2)
            if stages == 1:  # one layer is left
                yield Case(model, stages, replicas, units // 2, cached=False)
                yield Case(model, stages, replicas, units)
            elif model == "vit":
                for schedule in ("1f1b", "zb-h1"):
                    yield Case(model, stages, replicas, schedule=schedule)


def memory_cases(quick: bool) -> Iterator[Case]:
    """Yield those whose slots hold something else."""
    return (case for case in cases(quick) if case.cached and case.schedule == "gpipe")


def run(case: Case, folder: Path, *, memory: bool = False) -> dict[str, Any]:
    """Return what the worker's lead has written."""
    out = folder / "run.json"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += [f"--nproc-per-node={case.stages * case.replicas}", str(WORKER)]
    line += ["--model", case.model, "--stages", str(case.stages)]
    line += ["--replicas", str(case.replicas), "--frozen", str(case.frozen)]
    line += ["--schedule", case.schedule, "--out", str(out)]
    line += [] if case.cached else ["--no-cache"]
    line += ["--memory", "--epochs", "2"] if memory else []
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env |= GIVING_BACK if memory else {}
    run_child(line, timeout_s=900, log=folder / "run.log", env=env)
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def errors_of(told: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the errors in percent by kind, and the measured step in ms."""
    epochs = told["epochs"]
    measured = epochs[-1]["measured_step_ns"]
    predicted = {
        "before": told["layers_ns"],
        "first": epochs[0]["predicted_step_ns"],
        "learned": epochs[-1]["predicted_step_ns"],
    }
    errors = {kind: 100 * (ns / measured - 1) for kind, ns in predicted.items()}
    return errors, measured / 1e6


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--memory", action="store_true", help="memory in place of steps")
    add("--quick", action="store_true", help="two cases; not for publication")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    if args.memory:
        return compare_memory(args, start)
    found: dict[Case, dict[str, float]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args.quick):
            errors, step_ms = errors_of(run(case, Path(folder)))
            found[case] = errors
            shown = [f"{errors[kind]:+.0f} %" for kind in KINDS]
            lines.append([case.name, f"{step_ms:.1f}", *shown])
            print("  ".join(lines[-1]), flush=True)
    print(text_table(["case", "ms a step", *KINDS], lines))
    rows = list(summaries(found))
    for row in rows:
        print(f"{row.system}, {row.metric}: {row.median:.1f} %")
    if args.json is not None:
        write_json(
            args.json,
            "step_prediction",
            rows,
            [],
            start=start,
            quick=args.quick,
            errors={case.name: errors for case, errors in found.items()},
        )
    return 0


def compare_memory(args: argparse.Namespace, start: Start) -> int:
    """Compare each case's memory with its plan's."""
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in memory_cases(args.quick):
            told = run(case, Path(folder), memory=True)
            planned, measured = told["planned_bytes"], told["peak_bytes"]
            error = 100 * (planned / measured - 1)
            shown = [f"{size / 1e6:.0f}" for size in (planned, measured)]
            lines.append([case.name, *shown, f"{error:+.0f} %"])
            print("  ".join(lines[-1]), flush=True)
            for metric, unit, value in (
                ("planned", "MB", planned / 1e6),
                ("measured", "MB", measured / 1e6),
                ("size of the error", "%", abs(error)),
            ):
                aim = Target(MEMORY) if unit == "%" else None
                rows.append(
                    Row(
                        case.name,
                        metric,
                        unit,
                        (value,),
                        values_of="cases",
                        target=aim,
                    )
                )
    print(text_table(["case", "planned MB", "measured MB", "error"], lines))
    if args.json is not None:
        name = "memory_prediction"
        write_json(args.json, name, rows, [], start=start, quick=args.quick)
    return 0


def summaries(found: dict[Case, dict[str, float]]) -> Iterator[Row]:
    """Yield the median and the worst size of an error: of all, by model, by step."""
    groups: dict[str, list[Case]] = {"all": list(found)}
    for case in found:
        groups.setdefault(case.model, []).append(case)
        groups.setdefault(f"{case.stages} x {case.replicas}", []).append(case)
        groups.setdefault(case.what, []).append(case)
    for name, members in groups.items():
        for kind in KINDS:
            sizes = sorted(abs(found[case][kind]) for case in members)
            judged = kind != "before"
            for metric, value, aim in (
                ("median error", statistics.median(sizes), MEDIAN),
                ("worst error", sizes[-1], WORST),
            ):
                yield Row(
                    f"{name} ({len(members)})",
                    f"{kind}, {metric}",
                    "%",
                    (value,),
                    values_of="cases",
                    target=Target(aim) if judged and name == "all" else None,
                )


if __name__ == "__main__":
    sys.exit(main())
