"""One rank of one system of `table1_speedup`; started by torchrun, not by hand."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pipetransformer as pt
from pipetransformer import _C
from training import plain_loops, workload
from training.systems import SYSTEMS, System
from training.work import LayerCounter
from vit_digits import accuracy, load_split

MEETING_DEADLINE_S = 60.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--system", choices=list(SYSTEMS), required=True)
    add("--alpha", type=float, default=1 / 3)
    add("--slots", type=int, required=True)
    add("--seed", type=int, default=0)
    add("--epochs", type=int, default=workload.EPOCHS)
    add("--microbatches", type=int, help="forces M")
    add("--slot-memory", type=int, help="bytes per slot; default: no cap")
    add("--profiles", type=Path, metavar="DIR", help="where profiles are kept")
    add("--baseline-pipe", metavar="MODULE:ATTR")
    add("--pretrained", type=Path, default=Path("runs"))
    add("--out", type=Path, required=True, metavar="DIR")
    return parser.parse_args()


def run_engine(
    system: System,
    model: nn.Sequential,
    args: argparse.Namespace,
    counter: LayerCounter,
) -> pt.report.History:
    """Train with the engine under the system's switches."""
    train_set, test_set = load_split()
    steps = args.epochs * -(-len(train_set) // workload.BATCH_SIZE)
    engine = pt.PipeTransformer(
        model,
        optimizer=partial(workload.make_optimizer, model),
        lr_scheduler=partial(workload.make_scheduler, steps),
        loss=nn.CrossEntropyLoss(),
        freeze=(
            pt.freeze.AlphaCap(alpha=args.alpha, gradient_term=False)
            if system.freezes
            else pt.freeze.Never()
        ),
        units=workload.UNITS,
        config=pt.Config(
            seed=args.seed,
            plan=system.plan_config(
                args.slots, args.microbatches, args.slot_memory, args.profiles
            ),
            pipe=pt.PipeConfig(
                num_slots=args.slots, threads_per_stage=1, schedule=system.schedule
            ),
            cache=pt.CacheConfig(enabled=system.caches),
        ),
    )
    with engine:
        engine.prepare(train_set, workload.BATCH_SIZE)
        counter.reset()  # profiling is no work of the run; its time is in the run's
        for _ in engine.epochs(args.epochs):
            for batch in engine.batches(train_set, batch_size=workload.BATCH_SIZE):
                engine.step(batch)
            engine.evaluate(test_set, {"accuracy": accuracy})
    return engine.history


def meet(folder: Path, rank: int, size: int) -> None:
    """Wait until every rank has come here, so that no start-up is in the figures.

    Raises:
        TimeoutError: a rank did not come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready-{rank}").touch()
    give_up = time.monotonic() + MEETING_DEADLINE_S
    while not all((folder / f"ready-{r}").exists() for r in range(size)):
        if time.monotonic() > give_up:
            raise TimeoutError(f"ranks: expected all {size} to start, got fewer")
        time.sleep(0.002)


def main() -> None:
    args = parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(format="%(message)s")
    if rank == 0:
        logging.getLogger("pipetransformer").setLevel(logging.INFO)
    torch.set_num_threads(1)  # one slot, one core; where a process has all, see there
    _C.core.keep_freed_memory()  # as the engine does: no rival is to lose by that
    system = SYSTEMS[args.system]
    if rank == 0 and args.baseline_pipe is None:
        print(system.describe(), flush=True)
    model = workload.pretrained(args.pretrained, seed=args.seed)
    counter = LayerCounter(list(model)[1:-1], model[-1])  # the blocks
    importlib.import_module("torch._dynamo")  # DDP's own; imports are in no figure
    meet(args.out / os.environ["TORCHELASTIC_RUN_ID"], rank, size)
    if args.baseline_pipe is not None:
        history = plain_loops.run_pipe(model, args)
    elif system.engine:
        history = run_engine(system, model, args, counter)
    elif system.one_process:
        history = plain_loops.run_plain(model, args)
    else:
        history = plain_loops.run_ddp(model, args, freezes=system.freezes)
    args.out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        pt.report.write_summary(history, args.out / "summary.json")
        print(pt.report.closing_table(history))
    (args.out / f"work-{rank}.json").write_text(json.dumps(counter.rows()))


if __name__ == "__main__":
    main()
