"""Fine-tunes a Hugging Face language model on sentences, elastically.

torchrun --nproc-per-node=4 examples/causal_lm.py --model DIR --data DIR

Without `--model` a small GPT-2 is made from a config and trained from scratch, on the
tokens of the words themselves; nothing is frozen then. The loss is a mean over tokens:
padding does not count, however the batch is divided. `--check` trains the same in a
plain loop as well.
"""

from __future__ import annotations

import argparse
import collections
import copy
import math
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from text_classification import read


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="a name or a local folder; default: a small GPT-2 from scratch")
    add(
        "--data", type=Path, help="a folder with SST's parse trees: train.txt, test.txt"
    )
    add("--samples", type=int, help="sentences of each set; default: all")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=32, help="over all replicas")
    add("--accumulate", type=int, default=1, help="batches for each optimizer step")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--no-freeze", action="store_true", help="keep all layers active")
    add("--check", action="store_true", help="plain single-process training as well")
    return parser.parse_args()


class Words:
    """Numbers whole words, for the model from scratch."""

    end, rare = 1, 2

    def __init__(self, texts: list[str], size: int = 4000) -> None:
        counts = collections.Counter(word for text in texts for word in text.split())
        self.number = {w: i for i, (w, _) in enumerate(counts.most_common(size), 3)}

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens."""
        words = [self.number.get(word, self.rare) for word in text.split()]
        return [self.end, *words, self.end]


def tokenizer_and_model(args: argparse.Namespace, texts: list[str]):
    if args.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        return lambda text: tokenizer(text, truncation=True)["input_ids"], model
    words = Words(texts)
    sizes = {"n_positions": 128, "n_embd": 128, "n_layer": 4, "n_head": 4}
    ends = {"bos_token_id": Words.end, "eos_token_id": Words.end}
    config = GPT2Config(vocab_size=len(words.number) + 3, **sizes, **ends)
    return words.tokenize, GPT2LMHeadModel(config)


class Tokens(Dataset):
    """Lists of tokens; `collate` pads them to the longest of a batch."""

    def __init__(self, tokenize, texts: list[str]) -> None:
        self.rows = [torch.tensor(tokenize(text)[:128]) for text in texts]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad(rows, batch_first=True)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    labels = pad(rows, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def plain_perplexity(model, train: Dataset, test: Dataset, args) -> float:
    """Train in a plain loop of transformers; return the test set's perplexity."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    size = args.batch_size * args.accumulate
    model.train()
    for _ in range(args.epochs):
        for batch in DataLoader(train, size, shuffle=True, collate_fn=collate):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in DataLoader(test, 64, collate_fn=collate):
            tokens = int((batch["labels"][:, 1:] != -100).sum())
            total += tokens * float(model(**batch).loss)
            count += tokens
    return math.exp(total / count)


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    texts = [
        [text for text, _ in read(split, args.data)][: args.samples]
        for split in ("train", "test")
    ]
    tokenize, model = tokenizer_and_model(args, texts[0])
    train_set, test_set = (Tokens(tokenize, part) for part in texts)
    plain = copy.deepcopy(model) if args.check else None
    freezes = args.model is not None and not args.no_freeze  # else all has to learn
    engine = pt.PipeTransformer(
        from_transformers(model, untie=freezes),  # shared weights cannot freeze
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        freeze=pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False)
        if freezes
        else pt.freeze.Never(),
        config=pt.Config(seed=args.seed, accumulation_steps=args.accumulate),
    )
    with engine:
        for epoch in engine.epochs(args.epochs):
            for batch in engine.batches(train_set, args.batch_size, collate_fn=collate):
                engine.step(batch)
            loss = engine.evaluate(test_set, name="test", collate_fn=collate)["loss"]
            if engine.is_main:
                print(f"epoch {epoch}: perplexity {math.exp(loss):.2f}", flush=True)
    if engine.is_main and plain is not None:
        found = plain_perplexity(plain, train_set, test_set, args)
        print(f"the same in a plain loop, other batches: perplexity {found:.2f}")


if __name__ == "__main__":
    main()
