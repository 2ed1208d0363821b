"""One run of a search: a head and a learning rate on a frozen pre-trained model.

Started by benchmarks/cache_search.py. Dropout is off, so that runs with and without a
cache can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

import pipetransformer as pt
from pipetransformer.adapters import from_transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import text_classification as sst2

FROZEN = 4  # blocks
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--data", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--samples", type=int, required=True)
    add("--epochs", type=int, required=True)
    add("--head", type=int, required=True, help="seed of the head")
    add("--lr", type=float, required=True)
    add("--directory", type=Path, help="of kept activations")
    add("--no-cache", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.head)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=2, **NO_DROPOUT
    )
    model.bert.embeddings.requires_grad_(False)
    for block in model.bert.encoder.layer[:FROZEN]:
        block.requires_grad_(False)
    rows = sst2.read("train", args.data)[: args.samples]
    samples = sst2.Sentences(tokenizer, rows)
    engine = pt.PipeTransformer(
        from_transformers(model),
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        freeze=pt.freeze.Never(),  # but for what does not train
        config=pt.Config(
            cache=pt.CacheConfig(
                enabled=not args.no_cache,
                directory=args.directory,
                admission="always",
            ),
        ),
    )
    seconds, collate = 0.0, DataCollatorWithPadding(tokenizer)
    with engine:
        engine.prepare(samples, 32, collate_fn=collate)
        for _ in engine.epochs(args.epochs):
            began = time.perf_counter()
            for batch in engine.batches(samples, 32, collate_fn=collate):
                engine.step(batch)
            seconds += time.perf_counter() - began
        epochs = engine.history.epochs
    told = {
        "seconds": seconds,
        "hits": sum(epoch.cache_hits for epoch in epochs),
        "misses": sum(epoch.samples - epoch.cache_hits for epoch in epochs),
        "loss": epochs[-1].train_loss,
    }
    args.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
