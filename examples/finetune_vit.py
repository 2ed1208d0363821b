"""Elastic fine-tuning of a 12-block ViT on scikit-learn's digits.

    torchrun --nproc-per-node=4 examples/finetune_vit.py
    python examples/finetune_vit.py --slots 4

The model is pre-trained once on part of the training samples, gets a fresh head and
is fine-tuned on all of them. Front layers freeze as training goes on; the engine
shortens the pipeline, adds replicas where devices have cores for them, and reads
frozen activations from a cache.
``--no-freeze --static 4`` is the plain pipeline to compare with.
"""

import argparse
import logging
import math
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import pipetransformer as pt
from vit_digits import accuracy, freeze_units, load_split, pretrained_vit

PRETRAINED = Path("runs")
BLOCK_LR = 2e-4  # pre-trained layers move gently
HEAD_LR = 5e-3  # the head starts fresh
WEIGHT_DECAY = 0.05
WARMUP_STEPS = 34  # one epoch at batch size 32
MEBIBYTE = 2**20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=10)
    add("--alpha", type=float, default=1 / 3, help="freezing pace, in [0, 1)")
    add("--seed", type=int, default=0, help="of the head and of the sample order")
    add("--batch-size", type=int, default=32, help="samples per step, all replicas")
    add("--slots", type=int, default=1, help="CPU slots when run without torchrun")
    add("--slot-memory", type=float, default=9.5, metavar="MB", help="planner budget")
    add("--no-freeze", action="store_true", help="train every layer to the end")
    add("--no-cache", action="store_true", help="recompute frozen activations")
    add("--no-dp", action="store_true", help="keep one replica")
    add("--static", type=int, metavar="K", help="keep K pipeline stages to the end")
    add("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    add("--name", default="summary", help="the run writes DIR/NAME.json")
    add("--resume", action="store_true", help="go on from the last checkpoint in DIR")
    return parser.parse_args()


def make_optimizer(model: nn.Sequential, params: Iterable[nn.Parameter]) -> AdamW:
    """Return AdamW with a higher learning rate for the fresh head."""
    head = set(model[-1].parameters())
    params = list(params)
    groups = [
        {"params": [p for p in params if p not in head], "lr": BLOCK_LR},
        {"params": [p for p in params if p in head], "lr": HEAD_LR},
    ]
    return AdamW(groups, weight_decay=WEIGHT_DECAY)


def make_scheduler(num_steps: int, optimizer: Optimizer) -> LambdaLR:
    """Return a linear warm-up and a cosine to zero over `num_steps` steps."""
    warmup = min(WARMUP_STEPS, num_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))

    return LambdaLR(optimizer, factor)


def make_config(args: argparse.Namespace) -> pt.Config:
    """Return the engine's configuration for the command line."""
    return pt.Config(
        seed=args.seed,
        plan=pt.PlanConfig(
            # Small enough that the unfrozen model needs 4 slots. On CPU this is an
            # accounting limit of the planner, not a physical one.
            slot_memory_bytes=int(args.slot_memory * MEBIBYTE),
            num_stages=args.static,
            max_replicas=1 if args.no_dp else None,
        ),
        pipe=pt.PipeConfig(num_slots=args.slots),
        cache=pt.CacheConfig(enabled=not args.no_cache),
        checkpoint=pt.CheckpointConfig(
            directory=str(args.out / f"{args.name}-checkpoints"), resume=args.resume
        ),
    )


def show_progress() -> None:
    """Log to the console: the engine on rank 0, pre-training where it happens."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("vit_digits").setLevel(logging.INFO)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("pipetransformer").setLevel(logging.INFO)


def main() -> None:
    args = parse_args()
    show_progress()
    torch.set_num_threads(1)  # pre-training; the engine gives each slot its threads

    train_set, test_set = load_split()
    model = pretrained_vit(PRETRAINED, seed=args.seed)
    num_steps = args.epochs * math.ceil(len(train_set) / args.batch_size)
    engine = pt.PipeTransformer(
        model,
        optimizer=partial(make_optimizer, model),
        lr_scheduler=partial(make_scheduler, num_steps),
        loss=nn.CrossEntropyLoss(),
        freeze=(
            pt.freeze.Never()
            if args.no_freeze
            else pt.freeze.AlphaCap(alpha=args.alpha, gradient_term=False)
        ),
        units=freeze_units(model),
        config=make_config(args),
    )
    with engine:
        if engine.is_main:
            print(
                f"a slot may hold {args.slot_memory} MiB; on CPU this limit is the "
                "planner's account, not a physical one"
            )
        for epoch in engine.epochs(args.epochs):
            for batch in engine.batches(train_set, batch_size=args.batch_size):
                engine.step(batch)
            metrics = engine.evaluate(test_set, {"accuracy": accuracy})
            if engine.is_main:
                print(
                    f"epoch {epoch}: test loss {metrics['loss']:.4f}, "
                    f"accuracy {metrics['accuracy']:.2%}",
                    flush=True,
                )
        engine.save(args.out / f"{args.name}-model")

    if engine.is_main:
        summary = args.out / f"{args.name}.json"
        pt.report.write_summary(engine.history, summary)
        print(pt.report.closing_table(engine.history))
        print(f"summary: {summary}")


if __name__ == "__main__":
    main()
