"""How long the survivors of a lost rank stay in the dark.

python benchmarks/failure_time.py --json benchmarks/results/failure_time.json

Ranks add up a number over and over; one is killed, or stopped, at a random moment.
Timed on every survivor: from the signal until its collective has raised `PeerFailure`.
Without a model, checkpoint or end of a process: what remains is the group's own error,
the `abort` key, and for a stopped rank the heartbeat. Columns: METRICS.md.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from harness.common import Row, Target, begin, write_json
from harness.forked import Log, Ranks, fork_server
from harness.results import spread_table
from pipetransformer.autodp import (
    AutoDPConfig,
    ControlPlane,
    PeerFailure,
    build_group,
    connect,
)

WORLDS = (2, 4, 8)
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
HEARTBEAT_S = 2.0
WARM_S = (0.3, 0.6)  # of collectives before the signal
LONGEST_S = 60.0
# Until the last survivor knows, in the slowest repeat. Stopped ranks have no target:
# they take the heartbeat timeout, which is not the default one here.
TARGETS_MS = {"killed": Target(100.0, of="max")}


def run_rank(rank: int, folder: Path, heartbeat_s: float) -> None:
    """Add up until a rank is lost; log when this rank knows."""
    log = Log(folder / f"rank-{rank}.jsonl")
    config = AutoDPConfig(
        heartbeat_interval=timedelta(seconds=heartbeat_s / 10),
        heartbeat_timeout=timedelta(seconds=heartbeat_s),
    )
    info, store = connect(config)
    plane = ControlPlane(store, info, config)
    group = build_group(plane, name="g/0", members=range(info.world_size))
    number = torch.ones(1)
    group.all_reduce_(number)
    log.write("ready")
    try:
        while True:
            group.all_reduce_(number.fill_(1.0))
    except PeerFailure as failure:
        log.write("failed", phase=failure.phase)
    group.retire()
    plane.close()


def seconds_to_error(world_size: int, kind: str, moment: random.Random) -> list[float]:
    """Return, for each survivor, the seconds from the signal to its error.

    Raises:
        RuntimeError: a survivor did not hear of it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(run_rank, world_size, folder, HEARTBEAT_S) as ranks:
            _await(ranks, "ready", range(world_size))
            time.sleep(moment.uniform(*WARM_S))
            lost = moment.randrange(world_size)
            survivors = [rank for rank in range(world_size) if rank != lost]
            struck = time.monotonic()
            os.kill(ranks.processes[lost].pid, KINDS[kind])
            _await(ranks, "failed", survivors)
            logs = ranks.logs()
    return [logs[rank][-1]["at"] - struck for rank in survivors]


def _await(ranks: Ranks, kind: str, who: Sequence[int]) -> None:
    end = time.monotonic() + LONGEST_S
    while True:
        logs = ranks.logs()
        if all(logs[r] and logs[r][-1]["kind"] == kind for r in who):
            return
        if time.monotonic() > end:
            last = [log[-1:] for log in logs]
            raise RuntimeError(f"ranks {list(who)}: expected '{kind}', got {last}")
        time.sleep(0.005)


def rows_of(worlds: Sequence[int], repeats: int, seed: int) -> list[Row]:
    """Return times of the first and the last survivor; a repeat is a set of ranks."""
    moment, rows = random.Random(seed), []
    for kind in KINDS:
        for world in worlds:
            found = [seconds_to_error(world, kind, moment) for _ in range(repeats)]
            system = f"{kind}, {world} processes"
            for name, pick in (("first survivor", min), ("last survivor", max)):
                values = tuple(1e3 * pick(times) for times in found)
                aim = TARGETS_MS.get(kind) if pick is max else None
                rows.append(Row(system, name, "ms", values, target=aim))
    return rows


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="2 processes, one repeat")
    add("--repeats", type=int, default=7, help="sets of processes")
    add("--seed", type=int, default=0, help="of the moments and the lost ranks")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    fork_server("failure_time")
    worlds, repeats = ((2,), 1) if args.quick else (WORLDS, args.repeats)
    rows = rows_of(worlds, repeats, args.seed)
    print(spread_table(["what", "who"], rows))
    if args.json is not None:
        write_json(
            args.json,
            "failure_time",
            rows,
            [],
            start=start,
            quick=args.quick,
            heartbeat_timeout_s=HEARTBEAT_S,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
