"""Fine-tunes one task under freeze policies, by the engine in one process.

Started by benchmarks/freezing.py. Each run of a policy and a seed leaves a file of its
own, and is not made again: scores, losses, units frozen by epoch and the counted work.
A policy that froze nothing has run what an unfrozen run does, bit by bit: such a run of
its seed is not made, but for one seed, which proves it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pipetransformer as pt
import text_classification
import vit_digits
from training.work import TRAINING, LayerCounter, work_of

UNFROZEN, WATCHING = "unfrozen", "guarded, held-out loss"
POLICIES: dict[str, Callable[[], pt.freeze.Policy]] = {
    UNFROZEN: pt.freeze.Never,
    "cap 1/5": lambda: pt.freeze.AlphaCap(1 / 5, gradient_term=False),
    "cap 1/3": lambda: pt.freeze.AlphaCap(1 / 3, gradient_term=False),
    "cap 1/2": lambda: pt.freeze.AlphaCap(1 / 2, gradient_term=False),
    "gradient": lambda: pt.freeze.AlphaCap(1 / 3, gradient_term=True),
    "autofreeze": lambda: pt.freeze.AutoFreeze(),
    "plasticity": lambda: pt.freeze.Plasticity(),
    "guarded": lambda: pt.freeze.Guarded(),
    WATCHING: lambda: pt.freeze.Guarded(monitor=("loss", "min"), patience=1),
}
HEAD_LR, BLOCK_LR, WEIGHT_DECAY = 5e-3, 2e-4, 0.05


@dataclasses.dataclass
class Task:
    """What is trained, and how it is scored."""

    model: Any  # a Sequential, or what from_transformers gives
    layers: Sequence[nn.Module]  # whose rows are counted
    head: nn.Module
    train: Callable[[int], Any]  # the training set of an epoch
    batch: int
    epochs: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    score: Callable[[Any], float]  # of the engine, in percent
    collate: Callable[[list[Any]], Any] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    loss: Any = "model"
    units: list[int] | None = None
    held_out: Any = None  # a set that is neither trained on nor scored


class OtherLabels(vit_digits.Digits):  # type: ignore[misc]
    """Digits that are called by the next one's name."""

    def targets(self, index: int) -> Tensor:
        """Return the target of a sample."""
        other: Tensor = (super().targets(index) + 1) % vit_digits.NUM_CLASSES
        return other


def digits(kind: str, seed: int, folder: Path) -> Task:
    """Return a vision transformer, pre-trained on a part, with a fresh head."""
    share = {"digits 80 %": 0.8, "digits 50 %": 0.5}.get(kind, 1.0)
    recipe = vit_digits.Pretraining(share=share)
    if kind == "digits, half of the classes":
        recipe = dataclasses.replace(recipe, classes=5)
    model = vit_digits.pretrained_vit(folder, seed=seed, recipe=recipe)
    train, test = vit_digits.load_split()
    changed = OtherLabels(*train.tensors()), OtherLabels(*test.tensors())
    epochs, batch = 10, 32
    flips = kind == "digits, labels change"
    steps = epochs * -(-len(train) // batch)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        head, every = set(model[-1].parameters()), list(params)
        groups = [
            {"params": [p for p in every if p not in head], "lr": BLOCK_LR},
            {"params": [p for p in every if p in head], "lr": HEAD_LR},
        ]
        return torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY, fused=True)

    def scheduler(built: torch.optim.Optimizer) -> Any:
        warm_up = torch.optim.lr_scheduler.LinearLR(
            built, 1 / (steps // epochs), total_iters=steps // epochs
        )
        rest = steps - steps // epochs
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(built, rest)
        return torch.optim.lr_scheduler.SequentialLR(
            built, [warm_up, cosine], [steps // epochs]
        )

    def score(engine: pt.PipeTransformer) -> float:
        held = changed[1] if flips else test
        found = engine.evaluate(held, {"accuracy": vit_digits.accuracy})
        return 100 * found["accuracy"]

    return Task(
        model=model,
        layers=list(model)[1:-1],
        head=model[-1],
        train=lambda e: changed[0] if flips and 2 * e >= epochs else train,
        batch=batch,
        epochs=epochs,
        optimizer=optimizer,
        scheduler=scheduler,
        score=score,
        loss=nn.CrossEntropyLoss(),
        units=vit_digits.freeze_units(model),
    )


def text(kind: str, args: argparse.Namespace) -> Task:
    """Return MiniLM on SST-2 or XQuAD."""
    from transformers import AutoModelForSequenceClassification

    from pipetransformer.adapters import from_transformers
    from training import text_worker

    name = "xquad" if kind == "xquad" else "sst2"
    source: Any = text_worker.TASKS[name](
        argparse.Namespace(
            model=str(args.model), data=args.data, samples=None, length=256
        )
    )
    rate = source.lr
    if kind != "sst2" and name == "sst2":
        source.train.rows = source.train.rows[:1024]
    if kind == "sst2 1024, random weights":
        config = source.model.config
        source.model = AutoModelForSequenceClassification.from_config(config)
        rate = 3e-4
    adapted = from_transformers(source.model)
    held_out = None
    if name == "sst2":
        rows = text_classification.read("dev", args.data / "sst2")
        held_out = text_classification.Sentences(source.collate.tokenizer, rows)

    def score(engine: pt.PipeTransformer) -> float:
        logits = engine.predict(source.test, collate_fn=source.collate, name="test")
        return float(source.scores(logits)[source.metrics[-1]])

    return Task(
        model=adapted,
        layers=list(adapted.sequential)[1:-1],
        head=adapted.sequential[-1],
        train=lambda epoch: source.train,
        batch=source.batch,
        epochs=5 if "1024" in kind else 3,
        optimizer=lambda params: torch.optim.AdamW(params, lr=rate),
        score=score,
        collate=source.collate,
        held_out=held_out,
    )


def run(task: Task, name: str, seed: int, curve: bool) -> dict[str, Any]:
    """Train and score, with `curve` after each epoch; return what is compared."""
    policy, held_out, evaluations = POLICIES[name](), [], 0
    scores: list[tuple[int, float]] = []
    counter = LayerCounter(task.layers, task.head)
    engine = pt.PipeTransformer(
        task.model,
        optimizer=task.optimizer,
        lr_scheduler=task.scheduler,
        loss=task.loss,
        freeze=policy,
        units=task.units,
        config=pt.Config(
            seed=seed,
            # Of measured times the planner would choose M, which rounds otherwise.
            plan=pt.PlanConfig(num_stages=1, num_microbatches=1),
            pipe=pt.PipeConfig(num_slots=1, threads_per_stage=1),
            cache=pt.CacheConfig(admission="always"),
        ),
    )
    frozen = []
    with engine:
        engine.prepare(task.train(0), task.batch, collate_fn=task.collate)
        counter.reset()  # profiling is no work of the run
        for epoch in engine.epochs(task.epochs):
            frozen.append(policy.log[-1]["decision"])
            loader = engine.batches(
                task.train(epoch), task.batch, collate_fn=task.collate
            )
            for batch in loader:
                engine.step(batch)
            if name == WATCHING:
                before = work_of([counter.rows()], ["evaluated"])
                found = engine.evaluate(task.held_out, collate_fn=task.collate)
                held_out.append(found["loss"])
                evaluations += work_of([counter.rows()], ["evaluated"]) - before
            if curve or epoch == task.epochs - 1:
                work = work_of([counter.rows()], TRAINING)
                scores.append((work, task.score(engine)))
    work, score = scores[-1]
    records = engine.history.epochs
    return {
        "score": score,
        "work": work,
        "evaluations": evaluations,
        "frozen": frozen,
        "losses": [record.train_loss for record in records],
        "samples": [[record.samples, record.unique_samples] for record in records],
        "held_out": held_out,
        "curve": scores,
        "log": policy.log,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--task", required=True)
    add("--policies", nargs="+", choices=list(POLICIES), required=True)
    add("--seeds", nargs="+", type=int, required=True)
    add("--model", type=Path)
    add("--data", type=Path)
    add("--out", type=Path, required=True, metavar="DIR")
    add("--curves", action="store_true", help="score after each epoch")
    add("--quick", action="store_true", help="two epochs")
    add("--jobs", type=int, default=1, help="seeds made at a time")
    add("--minutes", type=float, help="begin no seed after them")
    add("--proof-seed", type=int, help="whose unfrozen run is made in any case")
    args = parser.parse_args()
    until = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    seeds, lock = iter(args.seeds), threading.Lock()

    def make_some(make: Callable[[int], object]) -> None:
        while True:
            with lock:
                seed = next(seeds, None) if time.monotonic() < until else None
            if seed is None:
                return
            try:
                make(seed)
            except BaseException:
                with lock:
                    list(seeds)  # no further one begins
                raise

    if args.jobs == 1:
        torch.set_num_threads(1)
        make_some(lambda seed: make_seed(args, seed))
        return
    with ThreadPoolExecutor(args.jobs) as jobs:
        list(jobs.map(make_some, args.jobs * [_make_alone]))


def _make_alone(seed: int) -> None:
    """Make a seed in a process of its own; of repeated options the last counts."""
    command = [sys.executable, *sys.argv, "--jobs", "1", "--seeds", str(seed)]
    subprocess.run(command, check=True)


def make_seed(args: argparse.Namespace, seed: int) -> None:
    """Make the runs of a seed that are not there; the unfrozen one last."""
    same = None
    for name in sorted(args.policies, key=lambda policy: policy == UNFROZEN):
        out = args.out / f"{args.task}, {name}, {seed}.json".replace("/", "-")
        if out.exists():
            found = json.loads(out.read_text())
        elif name == UNFROZEN and same is not None and seed != args.proof_seed:
            found = {**same, "log": []}
        else:
            found = made(args, name, seed)
        if name == UNFROZEN and same is not None:
            check_equal(found, same)
        elif is_unfrozen(found):
            same = {**found, "same_as": name}
        half = out.with_suffix(".half")
        half.write_text(json.dumps(found))
        os.replace(half, out)
        told = f"{found['score']:.2f} %, frozen {found['frozen']}"
        print(f"{args.task}, {name}, seed {seed}: {told}", flush=True)


def is_unfrozen(found: Mapping[str, Any]) -> bool:
    """Tell whether a run did nothing that an unfrozen one would not do."""
    return not any(found["frozen"]) and not found["evaluations"]


def check_equal(unfrozen: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check that a run which froze nothing is the unfrozen one.

    Raises:
        RuntimeError: it is not.
    """
    for name in ("losses", "score", "work"):
        if unfrozen[name] != other[name]:
            raise RuntimeError(
                f"{other['same_as']} that froze nothing: expected the unfrozen run's "
                f"{name}, {unfrozen[name]}, got {other[name]}"
            )


def made(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Make one run."""
    torch.manual_seed(seed)
    if args.task.startswith("digits"):
        task = digits(args.task, seed, Path("runs"))
    else:
        task = text(args.task, args)
    if args.quick:
        task.epochs = 2
    return run(task, name, seed, args.curves)


if __name__ == "__main__":
    main()
