"""Pre-training of the benchmarks' model: augmented digits, dropped tokens.

The paper fine-tunes a model that has seen much more than the task's own samples.
Here random rotations, scalings, shears and shifts of the training samples take that
place. Fine-tuning itself has no augmentation, so that its inputs can be cached.
"""

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

logger = logging.getLogger(__name__)

BACKGROUND = -0.3  # an empty pixel, as `load_split` gives it


@dataclass(frozen=True)
class Pretraining:
    """How the model is pre-trained, and on how many of the training samples."""

    share: float = 0.9  # of the training samples
    epochs: int = 70
    whole_epochs: int = 20  # the last epochs see all tokens
    tokens: int = 32  # seen by a sample in each epoch before those
    batch_size: int = 32
    peak_lr: float = 1e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    augmented: float = 0.8  # of the samples of each epoch
    angle: float = 0.15  # rotation and shear, radians at most
    scale: float = 0.1  # of either side, at most
    shift: float = 1.0  # pixels at most
    seed: int = 0


def augment(images: Tensor, recipe: Pretraining, generator: torch.Generator) -> Tensor:
    """Return `images` ``(rows, 8, 8)``, most of them turned, scaled and shifted."""
    rows, side = images.shape[:2]

    def draw(limit: float) -> Tensor:
        return limit * (2 * torch.rand(rows, generator=generator) - 1)

    angle, shear = draw(recipe.angle), draw(recipe.angle)
    wide, high = 1 + draw(recipe.scale), 1 + draw(recipe.scale)
    unit = recipe.shift * 2 / side  # the grid spans [-1, 1]
    first = torch.stack([wide * angle.cos(), shear - angle.sin(), draw(unit)], dim=1)
    second = torch.stack([angle.sin(), high * angle.cos(), draw(unit)], dim=1)
    grid = nn.functional.affine_grid(
        torch.stack([first, second], dim=1), [rows, 1, side, side], align_corners=False
    )
    moved = nn.functional.grid_sample(
        (images - BACKGROUND).unsqueeze(1), grid, align_corners=False
    )
    chosen = torch.rand(rows, 1, 1, generator=generator) < recipe.augmented
    return torch.where(chosen, moved.squeeze(1) + BACKGROUND, images)


def pretrain(
    model: nn.Sequential, inputs: Tensor, targets: Tensor, recipe: Pretraining
) -> None:
    """Train `model` in place on `inputs` ``(samples, 8, 8)`` and their targets."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.peak_lr,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    num_batches = -(-len(targets) // recipe.batch_size)
    scheduler = OneCycleLR(
        optimizer,
        recipe.peak_lr,
        total_steps=recipe.epochs * num_batches,
        pct_start=0.1,
        cycle_momentum=False,
    )
    loss_function = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    started = time.monotonic()
    for epoch in range(recipe.epochs):
        whole = epoch >= recipe.epochs - recipe.whole_epochs
        order = torch.randperm(len(targets), generator=generator)
        for rows in torch.split(order, recipe.batch_size):
            tokens = model[0](augment(inputs[rows], recipe, generator))
            if not whole:
                kept = torch.randperm(tokens.shape[1], generator=generator)
                tokens = tokens[:, kept[: recipe.tokens]]
            loss = loss_function(model[1:](tokens), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if (epoch + 1) % 10 == 0:
            logger.info(
                "pre-training on %d samples: epoch %d of %d, %.0f s",
                len(targets),
                epoch + 1,
                recipe.epochs,
                time.monotonic() - started,
            )
