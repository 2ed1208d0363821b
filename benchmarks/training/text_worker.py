"""Fine-tunes a real pre-trained model on real text, plainly or by the engine.

Started by benchmarks/real_models.py: under torchrun for the engine, as one process for
the plain loop of transformers, which takes the batches that the engine's sampler names.
Dropout is off: the engine's random numbers are its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    default_data_collator,
)

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from pipetransformer.data.loading import ElasticSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import squad
import text_classification as sst2

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Sst2:
    """Sentences, padded to the longest of their batch."""

    batch, lr, metrics = 32, 5e-5, ("accuracy",)

    def __init__(self, args: argparse.Namespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.model = AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=2, **NO_DROPOUT
        )
        self.collate = DataCollatorWithPadding(tokenizer)
        rows = {split: sst2.read(split, args.data / "sst2") for split in _SPLITS}
        self.train, self.test = (
            sst2.Sentences(tokenizer, rows[split][: args.samples]) for split in _SPLITS
        )

    def scores(self, logits: Any) -> dict[str, float]:
        """Return the percentage of sentences that are right."""
        truth = torch.tensor([row["labels"] for row in self.test.rows])
        return {"accuracy": 100 * float((logits.argmax(-1) == truth).double().mean())}


class XQuad:
    """Windows of a fixed length."""

    batch, lr, metrics = 16, 1e-4, ("exact_match", "f1")

    def __init__(self, args: argparse.Namespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.model = AutoModelForQuestionAnswering.from_pretrained(
            args.model, **NO_DROPOUT
        )
        self.collate = default_data_collator
        train, test = squad.read(args.data / "xquad")
        self.rows = test[: args.samples]
        self.train = squad.Windows(tokenizer, train[: args.samples], args.length)
        self.test = squad.Windows(tokenizer, self.rows, args.length)

    def scores(self, logits: Any) -> dict[str, float]:
        """Return exact match and F1 in percent."""
        found: dict[str, float] = squad.scores(
            squad.answers(self.rows, self.test, logits), self.rows
        )
        return found


_SPLITS = ("train", "test")
TASKS = {"sst2": Sst2, "xquad": XQuad}


def train_plainly(task: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Train in a plain loop; return losses of each step, scores and times."""
    model = task.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    sampler = ElasticSampler(len(task.train), task.batch, seed=args.seed)
    losses, seconds = [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began = time.perf_counter()
        for ids in sampler:
            loss = model(**task.collate([task.train[i] for i in ids])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
    scores = task.scores(predict_plainly(model, task))
    return {"losses": losses, "seconds": seconds, "scores": scores}


@torch.no_grad()
def predict_plainly(model: Any, task: Any) -> Any:
    """Return the logits of the test set."""
    model.eval()
    parts = []
    for first in range(0, len(task.test), 64):
        rows = range(first, min(first + 64, len(task.test)))
        outputs = model(**task.collate([task.test[i] for i in rows]))
        names = [name for name in ("logits", "start_logits") if name in outputs]
        names += ["end_logits"] if "end_logits" in outputs else []
        parts.append([outputs[name] for name in names])
    model.train()
    joined = [torch.cat(column) for column in zip(*parts, strict=True)]
    return joined if len(joined) > 1 else joined[0]


def train_elastically(task: Any, args: argparse.Namespace) -> dict[str, Any] | None:
    """Train by the engine; return the same, on the lead, and what the run tells."""
    freezes = args.system == "freezing"
    engine = pt.PipeTransformer(
        from_transformers(task.model),
        optimizer=lambda params: torch.optim.AdamW(params, lr=task.lr),
        freeze=pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False)
        if freezes
        else pt.freeze.Never(),
        config=pt.Config(
            seed=args.seed, cache=pt.CacheConfig(enabled=not args.no_cache)
        ),
    )
    mine: list[tuple[float, int]] = []
    seconds = []
    with engine:
        for _ in engine.epochs(args.epochs):
            began = time.perf_counter()
            for batch in engine.batches(
                task.train, task.batch, collate_fn=task.collate
            ):
                mine.append((float(engine.step(batch)), batch.rows))
            seconds.append(time.perf_counter() - began)
        logits = engine.predict(task.test, collate_fn=task.collate, name="test")
        main = engine.is_main
    place = Path(args.out).with_suffix(f".{engine.rank}.json")
    place.write_text(json.dumps(mine))
    if not main:
        return None
    history = engine.history.to_json()
    return {
        "seconds": seconds,
        "scores": task.scores(logits),
        "epochs": history["epochs"],
        "transformations": len(history["transformations"]),
        "cache": engine.history.cache,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--task", choices=TASKS, required=True)
    add("--system", choices=("plain", "engine", "freezing"), required=True)
    add("--model", required=True)
    add("--data", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--epochs", type=int, default=3)
    add("--samples", type=int)
    add("--length", type=int, default=256)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="of the plain loop")
    add("--no-cache", action="store_true", help="of frozen layers")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    task = TASKS[args.task](args)
    if args.system == "plain":
        torch.set_num_threads(args.threads)
        found: dict[str, Any] | None = train_plainly(task, args)
    else:
        found = train_elastically(task, args)
    if found is not None:
        args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
