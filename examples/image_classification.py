"""Fine-tunes a vision transformer of Hugging Face on handwritten digits, elastically.

torchrun --nproc-per-node=4 examples/image_classification.py

Images are those of scikit-learn's digits, made larger. Without `--model` a small ViT
is made from a config and pre-trained on half of the digits; then the other half is
learnt with a new head. `--check` fine-tunes the same in a plain loop as well.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import AutoModelForImageClassification, ViTConfig
from transformers import ViTForImageClassification as ViT

import pipetransformer as pt
from pipetransformer.adapters import from_transformers

SIZE, PATCH = 16, 4  # pixels


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="a name or a local folder; default: a small ViT")
    add("--samples", type=int, help="images of each set; default: all")
    add("--epochs", type=int, default=6)
    add("--pretrain", type=int, default=20, help="epochs of a small ViT beforehand")
    add("--batch-size", type=int, default=32, help="over all replicas")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--no-freeze", action="store_true", help="keep all layers active")
    add("--check", action="store_true", help="plain single-process fine-tuning too")
    return parser.parse_args()


class Images(Dataset):
    """Pictures of ``(3, size, size)`` and their classes, as dicts."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, size: int) -> None:
        self.pixels, self.labels, self.size = pixels, labels, size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        one = self.pixels[index][None, None]
        image = torch.nn.functional.interpolate(one, size=self.size, mode="bilinear")
        pixels = image[0].expand(3, -1, -1)
        return {"pixel_values": pixels, "labels": self.labels[index]}

    def input_key(self, index: int, epoch: int) -> int:
        """Return what tells inputs apart: the same in every epoch."""
        return index


def data_of(size: int, samples: int | None) -> tuple[Images, Images, Images]:
    """Return images for pre-training, training and test."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
    before, train, test = order[:800], order[800:1400], order[1400:]
    return (
        Images(pixels[before[:samples]], labels[before[:samples]], size),
        Images(pixels[train[:samples]], labels[train[:samples]], size),
        Images(pixels[test[:samples]], labels[test[:samples]], size),
    )


def train_plainly(model, images: Images, epochs: int, args: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model.train()
    for _ in range(epochs):
        for ids in torch.randperm(len(images)).split(args.batch_size):
            batch = torch.utils.data.default_collate([images[int(i)] for i in ids])
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def plain_accuracy(model, images: Images) -> float:
    model.eval()
    batch = torch.utils.data.default_collate([images[i] for i in range(len(images))])
    logits = model(pixel_values=batch["pixel_values"]).logits
    return float(correct(logits, batch["labels"]).mean())


def correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == labels).float()


def model_of(args: argparse.Namespace, images: Images):
    """Return a pre-trained model with a new head for ten classes."""
    if args.model is not None:
        return AutoModelForImageClassification.from_pretrained(
            args.model, num_labels=10, ignore_mismatched_sizes=True
        )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "image_size": SIZE, "patch_size": PATCH}
    before, model = (ViT(ViTConfig(**sizes, num_labels=10)) for _ in range(2))
    train_plainly(before, images, args.pretrain, args)
    model.vit.load_state_dict(before.vit.state_dict())
    return model


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    size = SIZE if args.model is None else 224
    before, train_set, test_set = data_of(size, args.samples)
    model = model_of(args, before)
    plain = copy.deepcopy(model) if args.check else None
    policy = (
        pt.freeze.Never()
        if args.no_freeze
        else pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False)
    )
    engine = pt.PipeTransformer(
        from_transformers(model),
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        freeze=policy,
        config=pt.Config(seed=args.seed),
    )
    with engine:
        for epoch in engine.epochs(args.epochs):
            for batch in engine.batches(train_set, args.batch_size):
                engine.step(batch)
            found = engine.evaluate(test_set, {"accuracy": correct}, name="test")
            if engine.is_main:
                print(f"epoch {epoch}: accuracy {found['accuracy']:.4f}", flush=True)
    if engine.is_main and plain is not None:
        train_plainly(plain, train_set, args.epochs, args)
        found = plain_accuracy(plain, test_set)
        print(f"the same in a plain loop, other batches: accuracy {found:.4f}")


if __name__ == "__main__":
    main()
