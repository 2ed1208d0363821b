"""Fine-tunes LoRA adapters of a Hugging Face model on SST-2, elastically.

torchrun --nproc-per-node=4 examples/lora.py --model DIR --data DIR --output DIR

Blocks before the first adapter are frozen from the start: they are computed once and
then read from the cache. Base weights do not train, so replicas tell each other of
adapters and head alone. `--output` gets the adapters, and a plain model with the
adapters merged into its weights. `--check` trains the same slice in a plain loop of
peft as well, on one process.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from text_classification import NAME, Sentences, correct, read


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
    add("--first", type=int, default=0, help="the first block with adapters")
    add("--rank", type=int, default=8, help="of the adapters")
    add("--targets", nargs="+", default=["query", "value"], help="adapted submodules")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=32, help="over all replicas")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--freeze", action="store_true", help="freeze adapters, too, as training goes")
    add("--check", action="store_true", help="plain single-process training as well")
    add("--output", type=Path, help="folder for the adapters and the merged model")
    return parser.parse_args()


def adapted_model(args: argparse.Namespace):
    """Return the model with adapters in its blocks from `--first` on."""
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=args.targets,
        layers_to_transform=list(range(args.first, model.config.num_hidden_layers)),
    )
    return get_peft_model(model, config)


def train_plainly(
    model, train: Dataset, test: Dataset, collate, args: argparse.Namespace
) -> tuple[float, float]:
    """Train in a plain loop; return loss of the last epoch and accuracy."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    model.train()
    for _ in range(args.epochs):
        total = 0.0
        loader = DataLoader(train, args.batch_size, shuffle=True, collate_fn=collate)
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * len(batch["labels"])
    model.eval()
    right = 0.0
    with torch.no_grad():
        for batch in DataLoader(test, 64, collate_fn=collate):
            right += float(correct(model(**batch).logits, batch["labels"]).sum())
    return total / len(train), right / len(test)


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    collate = DataCollatorWithPadding(tokenizer)
    train_set = Sentences(tokenizer, read("train", args.data)[: args.samples])
    test_set = Sentences(tokenizer, read("test", args.data)[: args.samples])
    model = adapted_model(args)
    plain = copy.deepcopy(model) if args.check else None
    engine = pt.PipeTransformer(
        from_transformers(model),
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        freeze=pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False)
        if args.freeze
        else pt.freeze.Never(),
        config=pt.Config(seed=args.seed),
    )
    with engine:
        for epoch in engine.epochs(args.epochs):
            for batch in engine.batches(train_set, args.batch_size, collate_fn=collate):
                engine.step(batch)
            found = engine.evaluate(
                test_set, {"accuracy": correct}, name="test", collate_fn=collate
            )
            if engine.is_main:
                print(f"epoch {epoch}: {found}", flush=True)
        if args.output is not None:
            engine.export_transformers(args.output / "adapters")
            engine.export_transformers(args.output / "merged", merge=True)
        if engine.is_main:
            model.print_trainable_parameters()
            last = engine.history.epochs[-1]
            print(f"{last.shape.boundary} layers frozen, loss {last.train_loss:.4f}")
    if engine.is_main and plain is not None:
        loss, right = train_plainly(plain, train_set, test_set, collate, args)
        print(f"in a plain loop: loss {loss:.4f}, accuracy {right:.4f}")


if __name__ == "__main__":
    main()
