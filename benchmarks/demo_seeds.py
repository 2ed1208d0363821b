"""Accuracy of the demo with and without freezing, over paired seeds.

python benchmarks/demo_seeds.py --seeds 0 1 2 3 4

Each seed gives one elastic and one static, unfrozen run of
``examples/finetune_vit.py``: same head, same batches, same number of steps. Prints
one line per seed and the mean; ends with status 1 if the mean differs by more than
``--tolerance`` points.
"""

import argparse
import json
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


def main() -> int:
    args = parse_args()
    static_flags = ["--no-freeze", f"--static={args.processes}"]
    differences = []
    print("seed  elastic  static  difference (points)")
    for seed in args.seeds:
        elastic = final_accuracy(args, seed, [])
        static = final_accuracy(args, seed, static_flags)
        differences.append(elastic - static)
        print(
            f"{seed:4}  {elastic:7.2f}  {static:6.2f}  {differences[-1]:+.2f}",
            flush=True,
        )
    mean = statistics.fmean(differences)
    print(f"mean difference {mean:+.2f} points over {len(differences)} seeds")
    return int(abs(mean) > args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
