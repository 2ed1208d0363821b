"""One rank of one run of `freezing_time`; started by torchrun, not by hand."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pipetransformer as pt
from training.freezing_worker import POLICIES, Task, digits, text
from training.work import LayerCounter


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--task", required=True)
    add("--policy", choices=list(POLICIES), required=True)
    add("--seed", type=int, required=True)
    add("--slots", type=int, required=True)
    add("--epochs", type=int, help="default: the task's")
    add("--model", type=Path)
    add("--data", type=Path)
    add("--out", type=Path, required=True, metavar="DIR")
    return parser.parse_args()


def run(task: Task, args: argparse.Namespace) -> tuple[pt.report.History, LayerCounter]:
    """Train as the planner likes and score once; return what was done."""
    counter = LayerCounter(task.layers, task.head)
    engine = pt.PipeTransformer(
        task.model,
        optimizer=task.optimizer,
        lr_scheduler=task.scheduler,
        loss=task.loss,
        freeze=POLICIES[args.policy](),
        units=task.units,
        config=pt.Config(
            seed=args.seed,
            pipe=pt.PipeConfig(num_slots=args.slots, threads_per_stage=1),
        ),
    )
    with engine:
        engine.prepare(task.train(0), task.batch, collate_fn=task.collate)
        counter.reset()  # profiling is no work of the run; its time is in the run's
        for epoch in engine.epochs(args.epochs or task.epochs):
            loader = engine.batches(
                task.train(epoch), task.batch, collate_fn=task.collate
            )
            for batch in loader:
                engine.step(batch)
        task.score(engine)
    return engine.history, counter


def main() -> None:
    args = parse_args()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)  # one slot, one core
    torch.manual_seed(args.seed)
    if args.task.startswith("digits"):
        task = digits(args.task, args.seed, Path("runs"))
    else:
        task = text(args.task, args)
    history, counter = run(task, args)
    args.out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        pt.report.write_summary(history, args.out / "summary.json")
    (args.out / f"work-{rank}.json").write_text(json.dumps(counter.rows()))


if __name__ == "__main__":
    main()
