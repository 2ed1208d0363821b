"""What filling a pipeline's gaps with frozen layers gains, measured and simulated.

python benchmarks/bubble_filling.py --json benchmarks/results/bubble_filling.json

Two stages on two cores, half of the freeze units frozen and run for every batch, as
where samples are augmented anew in each epoch. Each case is trained with the frozen
layers in front of the pipeline, spread over its workers (``replicated``), and in its
gaps (``filled``), in turn. A step is the mean of the third pass. Simulated is what the
plan says before the first step, from what that run has measured of its layers.

**Aims**: filled takes no longer than replicated, and the median gain is that which is
simulated, up to 5 points.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common import (
    Row,
    Target,
    begin,
    compared,
    run_child,
    write_json,
)
from harness.text import text_table

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "training" / "prediction_worker.py"
UNITS = {"vit": 12, "bert": 6}
STAGES = 2
PLACES = ("replicated", "filled")
POINTS = 5.0


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: Its name.
        microbatches: M.
        schedule: Of the plan.
    """

    model: str
    microbatches: int
    schedule: str = "gpipe"

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.model} M={self.microbatches} {self.schedule}"


CASES = (
    Case("vit", 2),
    Case("vit", 4),
    Case("vit", 8),
    Case("vit", 4, "1f1b"),
    Case("bert", 4),
)


def run(case: Case, place: str, folder: Path) -> tuple[float, float]:
    """Return the measured and the simulated step in ms."""
    out = folder / "run.json"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += [f"--nproc-per-node={STAGES}", str(WORKER), "--model", case.model]
    line += ["--stages", str(STAGES), "--replicas", "1", "--no-cache"]
    line += ["--frozen", str(UNITS[case.model] // 2), "--schedule", case.schedule]
    line += ["--microbatches", str(case.microbatches), "--prefix", place]
    line += ["--out", str(out)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run_child(line, timeout_s=900, log=folder / "run.log", env=env)
    epochs: list[dict[str, Any]] = json.loads(out.read_text())["epochs"]
    measured, simulated = epochs[-1]["measured_step_ns"], epochs[0]["predicted_step_ns"]
    return measured / 1e6, simulated / 1e6


def gain(times: Sequence[float], filled: Sequence[float]) -> float:
    """Return by how many percent a filled step is shorter, in the median."""
    pairs = zip(times, filled, strict=True)
    return 100 * statistics.median(1 - new / old for old, new in pairs)


def rows_of(
    case: Case, steps: dict[str, list[float]], simulated: dict[str, list[float]]
) -> list[Row]:
    """Return a case's figures."""
    both = [gain(each["replicated"], each["filled"]) for each in (steps, simulated)]
    rows = [
        Row(f"{case.name}, {place}", metric, "ms", tuple(values[place]))
        for place in PLACES
        for metric, values in (("step", steps), ("simulated", simulated))
    ]
    gains = zip(("gain", "simulated gain"), both, strict=True)
    rows += [
        Row(case.name, metric, "%", (value,), values_of="cases")
        for metric, value in gains
    ]
    apart = abs(both[0] - both[1])
    aim = Target(POINTS)
    row = Row(case.name, "apart", "points", (apart,), values_of="cases", target=aim)
    return [*rows, row]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="one case, once; not for publication")
    add("--repeats", type=int, default=5, help="runs of each case and place")
    args = parser.parse_args(arguments)
    start = begin()
    rows, ratios, lines = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES[1:2] if args.quick else CASES:
            steps: dict[str, list[float]] = {place: [] for place in PLACES}
            simulated: dict[str, list[float]] = {place: [] for place in PLACES}
            for turn in range(1 if args.quick else args.repeats):
                for place in PLACES if turn % 2 == 0 else reversed(PLACES):
                    step_ms, simulated_ms = run(case, place, Path(folder))
                    steps[place].append(step_ms)
                    simulated[place].append(simulated_ms)
                    print(f"{case.name}, {place}: {step_ms:.1f} ms", flush=True)
            found = rows_of(case, steps, simulated)
            front, filled = found[0], found[2]
            ratios += compared(
                f"{case.name}: filled / replicated",
                filled,
                front,
                better_than=front.system,
                quick=args.quick,
                target=Target(1.0, of="value"),
            )
            rows += found
            medians = (front.median, filled.median)
            shown = [f"{row.median:.1f}" for row in found[-3:]]
            lines.append([case.name, *(f"{each:.1f}" for each in medians), *shown])
    headers = ["case", "replicated ms", "filled ms", "gain %", "simulated %", "apart"]
    print(text_table(headers, lines))
    if args.json is not None:
        write_json(
            args.json, "bubble_filling", rows, ratios, start=start, quick=args.quick
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
