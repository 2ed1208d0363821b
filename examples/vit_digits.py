"""A small vision transformer on scikit-learn's digits: model, data, pre-training.

The model is an ``nn.Sequential`` of plain modules, ``[embedding, block x 12,
head]``: nothing in it knows of pipelines, replicas, freezing or caches.
"""

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import Dataset

logger = logging.getLogger(__name__)

NUM_CLASSES = 10
NUM_TOKENS = 16  # 8 rows and 8 columns of an 8x8 digit
PIXELS_PER_TOKEN = 8
SPLIT_SEED = 0  # of the train/test split: fixed, so all runs share one test set


class Embedding(nn.Module):
    """Turns digits ``(rows, 8, 8)`` into tokens ``(rows, 16, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(PIXELS_PER_TOKEN, width)
        self.position = nn.Parameter(0.02 * torch.randn(NUM_TOKENS, width))

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(rows, 16, width)`` from images ``(rows, 8, 8)``."""
        tokens = torch.cat([images, images.transpose(1, 2)], dim=1)
        return self.project(tokens) + self.position


class Block(nn.Module):
    """Pre-norm transformer block: self-attention, then a two-layer MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape, ``(rows, 16, width)``."""
        tokens = tokens + self._attend(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))

    def _attend(self, tokens: Tensor) -> Tensor:
        split = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Head(nn.Module):
    """Final norm, mean over the tokens, and the classifier: ``(rows, 10)`` logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(rows, 10)`` from tokens ``(rows, 16, width)``."""
        return self.classify(self.norm(tokens).mean(dim=1))


def build_vit(*, blocks: int = 12, width: int = 64, heads: int = 4) -> nn.Sequential:
    """Return the model ``[embedding, block x blocks, head]``."""
    return nn.Sequential(
        Embedding(width),
        *(Block(width, heads) for _ in range(blocks)),
        Head(width),
    )


def freeze_units(model: nn.Sequential) -> list[int]:
    """Return where each freeze unit ends: embedding and block 1, block 2, ...

    The head is in no unit, so it never freezes.
    """
    return list(range(2, len(model)))


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Digits as ``(8, 8)`` float32 tensors, about zero mean, and int64 targets."""

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self._images = images
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs(index), self.targets(index)

    def inputs(self, index: int) -> Tensor:
        """Return one image ``(8, 8)``."""
        return self._images[index]

    def targets(self, index: int) -> Tensor:
        """Return the target alone: all a step needs when its inputs are cached."""
        return self._targets[index]

    def input_key(self, index: int, epoch: int) -> int:
        """Name the input that ``inputs(index)`` gives in `epoch`.

        There is no augmentation, so it is the same in every epoch and what the
        frozen layers make of it can be read from the cache.
        """
        return index

    def first(self, count: int) -> "Digits":
        """Return the first `count` samples (the order is already random)."""
        return Digits(self._images[:count], self._targets[:count])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all inputs ``(samples, 8, 8)`` and targets ``(samples,)``."""
        return self._images, self._targets


def load_split() -> tuple[Digits, Digits]:
    """Return the training set (1078 samples) and the test set (719 samples)."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32) / 16.0 - 0.3
    targets = torch.tensor(bunch.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(targets)),
        test_size=0.4,
        random_state=SPLIT_SEED,
        stratify=bunch.target,
    )
    return Digits(images[train], targets[train]), Digits(images[test], targets[test])


def sample(rows: int = 16) -> Tensor:
    """Return the first images ``(rows, 8, 8)`` of the training set."""
    return load_split()[0].first(rows).tensors()[0]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for each row ``(rows,)`` whose largest logit is its target."""
    return (outputs.argmax(dim=1) == targets).float()


@dataclass(frozen=True)
class Pretraining:
    """What the pre-trained checkpoint depends on; any change makes a new file."""

    share: float = 0.9  # of the training samples
    classes: int = NUM_CLASSES  # the first ones; the others are never seen
    epochs: int = 36
    batch_size: int = 32
    peak_lr: float = 1e-3
    weight_decay: float = 0.05
    seed: int = 0
    blocks: int = 12
    width: int = 64
    heads: int = 4

    def build(self) -> nn.Sequential:
        """Return the model, with new weights."""
        return build_vit(blocks=self.blocks, width=self.width, heads=self.heads)

    def file_name(self) -> str:
        """Return the checkpoint's name, which depends on every setting."""
        return f"pretrained-{digest(asdict(self))}.pt"


def pretrained_vit(
    folder: Path,
    *,
    seed: int,
    recipe: Pretraining | None = None,
    deadline_s: float = 600.0,
) -> nn.Sequential:
    """Return the pre-trained model with a fresh head that depends on `seed` alone.

    The checkpoint is made once and kept in `folder`. Any number of processes may
    call this at the same time: one pre-trains, the others wait for its file.

    Raises:
        TimeoutError: the file was not there within `deadline_s` seconds.
    """
    recipe = recipe or Pretraining()
    path = folder / recipe.file_name()
    state = load_or_make(path, lambda: pretrain(recipe), deadline_s)
    with torch.random.fork_rng(devices=[]):
        model = recipe.build()
    model.load_state_dict(state)
    model[-1] = fresh_head(recipe.width, seed)
    return model


def fresh_head(width: int, seed: int) -> Head:
    """Return a new head that depends on `seed` alone; the global RNG is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Head(width)


def digest(settings: dict[str, object]) -> str:
    """Return 12 hexadecimal digits that change with any of the settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_or_make(
    path: Path, make: Callable[[], nn.Module], deadline_s: float
) -> dict[str, Tensor]:
    """Return the state saved at `path`; if there is none, that of `make()`, saved.

    Of several processes one calls `make`, the others wait for its file.

    Raises:
        TimeoutError: the file was not there within `deadline_s` seconds.
    """
    if not path.exists():
        with _lock(path.with_suffix(".lock"), deadline_s):
            if not path.exists():
                _save_atomically(make().state_dict(), path)
    state: dict[str, Tensor] = torch.load(path, weights_only=True)
    return state


def pretrain(recipe: Pretraining) -> nn.Sequential:
    """Train a new model on part of the training samples and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = recipe.build()
    train_set, _ = load_split()
    inputs, targets = train_set.first(round(recipe.share * len(train_set))).tensors()
    seen = targets < recipe.classes
    inputs, targets = inputs[seen], targets[seen]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.peak_lr,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    steps_per_epoch = -(-len(targets) // recipe.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        recipe.peak_lr,
        total_steps=recipe.epochs * steps_per_epoch,
        pct_start=0.1,
        cycle_momentum=False,
    )
    order = torch.Generator().manual_seed(recipe.seed)
    started = time.monotonic()
    for epoch in range(recipe.epochs):
        for rows in torch.randperm(len(targets), generator=order).split(
            recipe.batch_size
        ):
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
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
    return model


def _save_atomically(state: dict[str, Tensor], path: Path) -> None:
    """Write a temporary file and rename it: `path` is whole or absent."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def _lock(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it if the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"pre-trained checkpoint: expected another process to finish "
                        f"it within {deadline_s:.0f} s, got none (lock {path})"
                    ) from None
                time.sleep(0.2)
        yield
