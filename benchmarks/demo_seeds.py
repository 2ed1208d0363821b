"""Accuracy of the demo with and without freezing, over paired seeds.

python benchmarks/demo_seeds.py --seeds 0 1 2 3 4

Each seed gives one elastic and one static, unfrozen run of
``examples/finetune_vit.py``: same head, same batches, same number of steps. Prints
one line per seed and the mean; ends with status 1 if the mean differs by more than
``--tolerance`` points.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "finetune_vit.py"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--processes", type=int, default=4)
    add("--tolerance", type=float, default=1.0, help="points of accuracy")
    add("--timeout", type=float, default=600.0, help="seconds per run")
    add("--out", type=Path, default=Path("runs/seeds"), metavar="DIR")
    add("--json", type=Path, metavar="PATH", help="write the figures here too")
    return parser.parse_args()


def final_accuracy(args: argparse.Namespace, seed: int, flags: list[str]) -> float:
    """Run the demo once and return its final test accuracy in percent.

    Raises:
        RuntimeError: the run failed; names its log file.
        subprocess.TimeoutExpired: the run took longer than ``--timeout``.
    """
    name = f"seed{seed}-{'static' if flags else 'elastic'}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.processes}", str(SCRIPT)]
    command += [f"--seed={seed}", f"--out={args.out}", f"--name={name}", *flags]
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout=args.timeout)
        finally:
            process.terminate()  # the launcher passes it on; no effect once it ended
            process.wait()
    if status != 0:
        raise RuntimeError(f"{name}: expected exit status 0, got {status}; see {log}")
    summary = json.loads((args.out / f"{name}.json").read_text())
    return 100.0 * float(summary["final_accuracy"])


def write_json(path: Path, rows: list[dict[str, float]], mean: float) -> None:
    """Write test accuracies in percent and differences in points."""
    content = {
        "name": "demo_seeds",
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "gpu": None,
            "torch": importlib.metadata.version("torch"),
        },
        "unit": "percent of test accuracy; difference in points",
        "rows": rows,
        "mean_difference": mean,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    args = parse_args()
    static_flags = ["--no-freeze", f"--static={args.processes}"]
    rows = []
    print("seed  elastic  static  difference (points)")
    for seed in args.seeds:
        elastic = final_accuracy(args, seed, [])
        static = final_accuracy(args, seed, static_flags)
        row = {"seed": seed, "elastic": elastic, "static": static}
        rows.append({**row, "difference": elastic - static})
        print(
            f"{seed:4}  {elastic:7.2f}  {static:6.2f}  {elastic - static:+.2f}",
            flush=True,
        )
    mean = statistics.fmean(row["difference"] for row in rows)
    print(f"mean difference {mean:+.2f} points over {len(rows)} seeds")
    if args.json is not None:
        write_json(args.json, rows, mean)
    return int(abs(mean) > args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
