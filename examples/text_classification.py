"""Fine-tunes a Hugging Face model on SST-2, elastically.

torchrun --nproc-per-node=4 examples/text_classification.py --model DIR --data DIR

Sentences are padded to the longest of their batch. `--data` takes a folder with the
trees of SST (train.txt, dev.txt, test.txt); without it the datasets library loads GLUE.
`--check` trains the same slice in a plain loop of transformers as well.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

import pipetransformer as pt
from pipetransformer.adapters import from_transformers

NAME = "sentence-transformers/all-MiniLM-L6-v2"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default=NAME, help="a name or a local folder")
    add(
        "--data",
        type=Path,
        help="a folder with SST's parse trees: train.txt, dev.txt, test.txt",
    )
    add("--samples", type=int, help="training sentences; default: all")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=32, help="over all replicas")
    add("--lr", type=float, default=5e-5)
    add("--seed", type=int, default=0)
    add("--no-freeze", action="store_true", help="keep all layers active")
    add("--check", action="store_true", help="plain single-process training as well")
    add("--output", type=Path, help="folder for the trained model")
    return parser.parse_args()


def read(split: str, folder: Path | None) -> list[tuple[str, int]]:
    """Return shuffled sentences, 1 for positive; neutral trees are left out."""
    if folder is None:
        from datasets import load_dataset

        split = {"dev": "validation", "test": "validation"}.get(split, split)
        rows = load_dataset("stanfordnlp/sst2", split=split)
        return [(row["sentence"], row["label"]) for row in rows]
    trees = (folder / f"{split}.txt").read_text().splitlines()
    if not all(re.match(r"\([0-4] ", tree) for tree in trees):
        raise ValueError(
            f"{split}.txt: expected a tree per line, such as (3 (2 It) ...)"
        )
    rows = [
        (" ".join(re.findall(r"\(\d ([^()]+)\)", tree)), int(int(tree[1]) > 2))
        for tree in trees
        if tree[1] != "2"
    ]
    random.Random(0).shuffle(rows)
    return rows


class Sentences(Dataset):
    """Tokenized sentences of different lengths, as dicts."""

    def __init__(self, tokenizer, rows: list[tuple[str, int]]) -> None:
        self.rows = [
            {**tokenizer(text, truncation=True), "labels": y} for text, y in rows
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return dict(self.rows[index])

    def input_key(self, index: int, epoch: int) -> int:
        """Return what tells inputs apart: the same in every epoch."""
        return index


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == labels).float()


def train_plainly(
    model, sentences: Dataset, collator, args: argparse.Namespace
) -> float:
    """Train in a plain loop; return the loss of the last epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model.train()
    for _ in range(args.epochs):
        total = 0.0
        for ids in torch.randperm(len(sentences)).split(args.batch_size):
            batch = collator([sentences[i] for i in ids.tolist()])
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(ids)
    return total / len(sentences)


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    collator = DataCollatorWithPadding(tokenizer)
    train_set = Sentences(tokenizer, read("train", args.data)[: args.samples])
    test_set = Sentences(tokenizer, read("test", args.data)[: args.samples])
    plain = copy.deepcopy(model) if args.check else None
    adapted = from_transformers(model)
    policy = (
        pt.freeze.Never()
        if args.no_freeze
        else pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False)
    )
    engine = pt.PipeTransformer(
        adapted,
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        freeze=policy,
        config=pt.Config(seed=args.seed),
    )
    with engine:
        for epoch in engine.epochs(args.epochs):
            for batch in engine.batches(
                train_set, args.batch_size, collate_fn=collator
            ):
                engine.step(batch)
            found = engine.evaluate(
                test_set, {"accuracy": correct}, name="test", collate_fn=collator
            )
            if engine.is_main:
                print(f"epoch {epoch}: {found}", flush=True)
        if args.output is not None:
            engine.export_transformers(args.output)
        if engine.is_main:
            loss = engine.history.epochs[-1].train_loss
            print(f"training loss of the last epoch: {loss:.4f}")
    if engine.is_main and plain is not None:
        loss = train_plainly(plain, train_set, collator, args)
        print(f"the same in a plain loop, other batches: {loss:.4f}")


if __name__ == "__main__":
    main()
