"""A thousand transformations: does any process grow?

python benchmarks/endurance.py --json benchmarks/results/endurance.json

Four processes cycle through 4x1, 2x2, 1x4 and 2x2 stages x replicas by freezing and
unfreezing, a step between two changes. Each change is a whole one: protocol, group,
move of weights and moments, hashes, new pipeline and DDP. Descriptors, threads and
resident memory of each rank and the keys of the store are counted early and at the
end, at the same place of the cycle; with new groups each time, and with groups that
are kept for layouts seen before. The status is 1 if anything grew (METRICS.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from faults.small_run import BATCH, Deadlines, SmallSet, small_engine
from harness.forked import Log, Ranks, fork_server
from harness.provenance import begin
from harness.results import write_json
from harness.text import text_table
from pipetransformer import AutoDPConfig

WORLD = 4
CYCLE = (0, 5, 6, 5)  # units frozen: 4x1, 2x2, 1x4, 2x2
SETTLE_S = 1.0  # groups are taken apart in the background
MOST_MEMORY_MB = 16.0
COUNTS = ("descriptors", "threads", "memory_mb", "store_keys")
DEADLINES = Deadlines(heartbeat=20.0, protocol=60.0)


def run_rank(
    rank: int, folder: Path, changes: int, marks: Sequence[int], options: dict[str, Any]
) -> None:
    """Train one step per epoch, with a change before each; count at the marks."""
    log = Log(folder / f"rank-{rank}.jsonl")
    freezes = [CYCLE[epoch % len(CYCLE)] for epoch in range(changes + 1)]
    engine = small_engine(WORLD, autodp=DEADLINES.config(**options), freezes=freezes)
    data = SmallSet(BATCH)
    with engine:
        began = time.perf_counter()
        for epoch in engine.epochs(changes + 1):
            if epoch in marks:
                log.write("count", changes=epoch, **counts(rank))
            for batch in engine.batches(data, BATCH):
                engine.step(batch)
        seconds = time.perf_counter() - began
    records = engine.history.to_json()["transformations"]
    pauses = [record["pause_seconds"] for record in records]
    log.write("end", seconds=seconds, changes=len(records), pauses=pauses)


def counts(rank: int) -> dict[str, float]:
    """Count what this process holds once the background is done; rank 0 the keys."""
    time.sleep(SETTLE_S)
    gc.collect()
    keys = store_keys() if rank == 0 else 0
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory_mb": resident_mb(),
        "store_keys": keys,
    }


def store_keys() -> int:
    """Return the number of keys of the store, over a connection of its own."""
    from torch._C._distributed_c10d import TCPStore

    wait = timedelta(seconds=DEADLINES.store)
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=wait)
    keys: int = store.num_keys()
    return keys


def resident_mb() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclasses.dataclass(frozen=True)
class Endurance:
    """One run of many changes.

    Attributes:
        changes: Transformations that were committed.
        seconds: Of the whole loop, steps included.
        before: What each rank counted early.
        after: What each rank counted at the end.
    """

    changes: int
    seconds: float
    before: list[dict[str, float]]
    after: list[dict[str, float]]

    def growth(self) -> list[str]:
        """Say what grew; nothing is as it should be."""
        found = []
        for rank, (old, new) in enumerate(zip(self.before, self.after, strict=True)):
            for what in COUNTS:
                allowed = MOST_MEMORY_MB if what == "memory_mb" else 0.0
                if new[what] - old[what] > allowed:
                    found.append(f"rank {rank}: {what} {old[what]:g} -> {new[what]:g}")
        return found


def endure(changes: int, early: int, options: Mapping[str, Any]) -> Endurance:
    """Run and count.

    Raises:
        RuntimeError: a rank ended with an error, or fewer changes took place.
    """
    marks = (early, changes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, WORLD, folder, changes, marks, dict(options)) as ranks:
            for process in ranks.processes:
                process.join(60.0 + 3.0 * changes)
            logs, errors = ranks.logs(), ranks.errors()
    if any(errors) or any(not log or log[-1]["kind"] != "end" for log in logs):
        raise RuntimeError(f"endurance: expected all ranks to end, got {errors}")
    if logs[0][-1]["changes"] != changes:
        raise RuntimeError(f"expected {changes} changes, got {logs[0][-1]['changes']}")
    before, after = (
        [next(line for line in log if line.get("changes") == mark) for log in logs]
        for mark in marks
    )
    return Endurance(changes, logs[0][-1]["seconds"], before, after)


def variants() -> dict[str, dict[str, Any]]:
    """Return the options of each run: cached groups only where they are built."""
    known = {field.name for field in dataclasses.fields(AutoDPConfig)}
    if "cached_groups" not in known:
        return {"new groups": {}}
    return {"new groups": {"cached_groups": 0}, "cached groups": {"cached_groups": 4}}


def table(found: Mapping[str, Endurance]) -> str:
    """Return the counts of each rank, early and at the end."""
    lines = []
    for name, run in found.items():
        for rank, (old, new) in enumerate(zip(run.before, run.after, strict=True)):
            cells = [f"{old[what]:.6g} -> {new[what]:.6g}" for what in COUNTS]
            lines.append([name, str(rank), *cells])
    return text_table(["groups", "rank", *COUNTS], lines)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="12 changes; not for publication")
    add("--changes", type=int, default=1000)
    add("--early", type=int, default=100, help="the change of the first count")
    args = parser.parse_args(arguments)
    if args.quick:
        args.changes, args.early = 12, 4
    if args.early % len(CYCLE) or args.changes % len(CYCLE):
        parser.error(f"--early, --changes: expected multiples of {len(CYCLE)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("faults.small_run")
    found = {
        name: endure(args.changes, args.early, options)
        for name, options in variants().items()
    }
    print(table(found))
    grown = {name: run.growth() for name, run in found.items()}
    for name, run in found.items():
        each_ms = 1e3 * run.seconds / run.changes
        print(f"{name}: {run.changes} changes, {each_ms:.0f} ms per change and step")
        print("\n".join(f"  GREW {text}" for text in grown[name]) or "  nothing grew")
    if args.json is not None:
        write_json(
            args.json,
            "endurance",
            [],
            [],
            start=start,
            quick=args.quick,
            early=args.early,
            runs={name: dataclasses.asdict(run) for name, run in found.items()},
            grew=grown,
        )
    return 1 if any(grown.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
