"""The benchmarks' workload: model, data, optimizer and schedule of one fine-tuning run.

As in ``examples/vit_digits.py``, but a token per pixel, so that a step is compute and
not overhead. A plain ``nn.Sequential``, ``[embedding, block x 12, head]``.
docs/recipe.md, "The benchmark's recipe", says how the numbers were chosen.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from training.pretrain import Pretraining, pretrain

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from vit_digits import (  # noqa: E402
    Block,
    Digits,
    Head,
    accuracy,
    digest,
    fresh_head,
    load_or_make,
    load_split,
)

__all__ = [
    "BATCH_SIZE",
    "EPOCHS",
    "SETTINGS",
    "UNITS",
    "Digits",
    "Settings",
    "accuracy",
    "build_model",
    "load_split",
    "make_optimizer",
    "make_scheduler",
    "pretrained",
]

SIDE = 8  # pixels
EPOCHS = 10
BATCH_SIZE = 64  # 17 steps per epoch of 1078 samples
BLOCK_LR = 3e-5  # pre-trained layers move gently
HEAD_LR = 5e-3  # the head starts fresh
WEIGHT_DECAY = 0.05
WARMUP_SHARE = 1 / EPOCHS  # of the steps: one epoch


@dataclass(frozen=True)
class Settings:
    """What the pre-trained checkpoint depends on; any change makes a new file."""

    blocks: int = 12
    width: int = 64
    heads: int = 4
    window: int = 5  # pixels: side of the neighbourhood that a token starts from
    position_std: float = 0.1
    pretraining: Pretraining = field(default_factory=Pretraining)

    def file_name(self) -> str:
        """Return the checkpoint's name, which depends on every setting."""
        return f"pretrained-pixels-{digest(asdict(self))}.pt"


SETTINGS = Settings()
# Where each freeze unit ends: embedding and block 1, block 2, ... The head is in none.
UNITS = list(range(2, SETTINGS.blocks + 2))


class PixelEmbedding(nn.Module):
    """Turns digits ``(rows, 8, 8)`` into a token per pixel, ``(rows, 64, width)``.

    A token starts from the pixel's neighbourhood. From the pixel alone the model
    learns very slowly (docs/recipe.md).
    """

    def __init__(self, width: int, window: int, position_std: float) -> None:
        super().__init__()
        self.window = window
        self.project = nn.Linear(window * window, width)
        self.position = nn.Parameter(position_std * torch.randn(SIDE * SIDE, width))

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(rows, 64, width)`` from images ``(rows, 8, 8)``."""
        patches = nn.functional.unfold(
            images.unsqueeze(1), self.window, padding=self.window // 2
        )
        tokens: Tensor = self.project(patches.transpose(1, 2)) + self.position
        return tokens


def build_model(settings: Settings = SETTINGS) -> nn.Sequential:
    """Return the model ``[embedding, block x 12, head]`` with new weights."""
    return nn.Sequential(
        PixelEmbedding(settings.width, settings.window, settings.position_std),
        *(Block(settings.width, settings.heads) for _ in range(settings.blocks)),
        Head(settings.width),
    )


def pretrained(
    folder: Path,
    seed: int,
    *,
    settings: Settings = SETTINGS,
    deadline_s: float = 1800.0,
) -> nn.Sequential:
    """Return the pre-trained model with a fresh head that depends on `seed` alone.

    The checkpoint is made once, in some minutes, and kept in `folder`. Any number of
    processes may call this at the same time: one pre-trains, the others wait.

    Raises:
        TimeoutError: the file was not there within `deadline_s` seconds.
    """
    path = folder / settings.file_name()
    state = load_or_make(path, lambda: _pretrain(settings), deadline_s)
    with torch.random.fork_rng(devices=[]):
        model = build_model(settings)
    model.load_state_dict(state)
    model[-1] = fresh_head(settings.width, seed)
    return model


def _pretrain(settings: Settings) -> nn.Sequential:
    recipe = settings.pretraining
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_model(settings)
    train_set, _ = load_split()
    part = train_set.first(round(recipe.share * len(train_set)))
    inputs, targets = part.tensors()
    pretrain(model, inputs, targets, recipe)
    return model


def make_optimizer(model: nn.Sequential, params: Iterable[nn.Parameter]) -> AdamW:
    """Return fused AdamW over `params`, with a higher rate for the fresh head."""
    head = set(model[-1].parameters())
    params = list(params)
    groups = [
        {"params": [p for p in params if p not in head], "lr": BLOCK_LR},
        {"params": [p for p in params if p in head], "lr": HEAD_LR},
    ]
    return AdamW(groups, weight_decay=WEIGHT_DECAY, fused=True)


def make_scheduler(num_steps: int, optimizer: Optimizer) -> LambdaLR:
    """Return a linear warm-up over a tenth of `num_steps`, then a cosine to zero."""
    warmup = math.ceil(WARMUP_SHARE * num_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))

    return LambdaLR(optimizer, factor)
