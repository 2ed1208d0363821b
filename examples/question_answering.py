"""Fine-tunes a Hugging Face model to find answers in paragraphs, elastically.

torchrun --nproc-per-node=4 examples/question_answering.py --model DIR --data DIR

`--data` takes a folder with xquad.en.json; without it the datasets library loads it. A
paragraph longer than `--length` tokens becomes several windows, each its own sample.
`--check` trains the same in a plain loop of transformers afterwards, on one process.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    default_data_collator,
)

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from squad import Windows, answers, read, scores

NAME = "sentence-transformers/all-MiniLM-L6-v2"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default=NAME, help="a name or a local folder")
    add("--data", type=Path, help="a folder with xquad.en.json")
    add("--samples", type=int, help="questions of each set; default: all")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=16, help="over all replicas")
    add("--length", type=int, default=256, help="tokens of a window")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--freeze", action="store_true", help="a third an epoch: faster, costs F1")
    add("--check", action="store_true", help="plain single-process training as well")
    return parser.parse_args()


def train_plainly(model, windows: Windows, args: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model.train()
    for _ in range(args.epochs):
        for batch in DataLoader(
            windows, args.batch_size, shuffle=True, collate_fn=default_data_collator
        ):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def predict_plainly(model, windows: Windows) -> list[torch.Tensor]:
    model.eval()
    loader = DataLoader(windows, 32, collate_fn=default_data_collator)
    outputs = [model(**batch) for batch in loader]
    return [
        torch.cat([getattr(part, name) for part in outputs])
        for name in ("start_logits", "end_logits")
    ]


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model)
    train, test = (rows[: args.samples] for rows in read(args.data))
    train_set = Windows(tokenizer, train, args.length)
    test_set = Windows(tokenizer, test, args.length)
    plain = copy.deepcopy(model) if args.check else None
    policy = (
        pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False)
        if args.freeze
        else pt.freeze.Guarded()  # little is left to learn before it freezes
    )
    engine = pt.PipeTransformer(
        from_transformers(model),
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        freeze=policy,
        config=pt.Config(seed=args.seed),
    )
    with engine:
        for epoch in engine.epochs(args.epochs):
            for batch in engine.batches(
                train_set, args.batch_size, collate_fn=default_data_collator
            ):
                engine.step(batch)
            logits = engine.predict(test_set, collate_fn=default_data_collator)
            if engine.is_main:
                found = scores(answers(test, test_set, logits), test)
                print(f"epoch {epoch}: {found}", flush=True)
    if engine.is_main and plain is not None:
        train_plainly(plain, train_set, args)
        logits = predict_plainly(plain, test_set)
        found = scores(answers(test, test_set, logits), test)
        print(f"the same in a plain loop, other batches: {found}")


if __name__ == "__main__":
    main()
