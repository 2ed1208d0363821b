"""Small models of every supported family and task, and batches for them."""

import pytest

from tests.adapters import hf_decoders, hf_encoders, hf_seq2seq, hf_vision
from tests.adapters.hf_small import PADDING, SMALL_BERT, WORDS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", reason="needs the extra 'transformers'"
)

LENGTHS = (9, 4, 7, 9)

_FAMILIES = {**hf_encoders.FAMILIES, **hf_vision.FAMILIES, **hf_decoders.FAMILIES}
CASES = [(name, task) for name, (_, tasks) in _FAMILIES.items() for task in tasks]
"""(prefix of the classes, task)"""


def make_model(name, task, dtype=torch.float32, **changes):
    """Return a task model with drawn weights, in evaluation mode."""
    values, tasks = {**_FAMILIES, **hf_encoders.ENCODERS, **hf_seq2seq.FAMILIES}[name]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, name + tasks[task])(config)
    return model.to(dtype).eval()


def make_batch(task, rows=4, dtype=torch.float32):
    """Return a batch as a data collator makes it, padded to its longest row."""
    drawn = torch.Generator().manual_seed(2)
    if task == "image-classification":
        pixels = torch.randn(rows, 3, 8, 8, generator=drawn, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 3}
    lengths = torch.tensor([LENGTHS[k % len(LENGTHS)] for k in range(rows)])
    there = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.randint(3, WORDS, there.shape, generator=drawn)
    batch = {
        "input_ids": torch.where(there, ids, PADDING),
        "attention_mask": there.long(),
    }
    if task == "sequence-classification":
        batch["labels"] = torch.arange(rows) % 2
    elif task == "token-classification":
        batch["labels"] = torch.where(there, ids % 2, -100)
    elif task == "causal-lm":
        batch["labels"] = torch.where(there, ids, -100)
    elif task == "masked-lm":
        batch["labels"] = torch.where(there & (ids % 3 == 0), ids, -100)
    elif task == "multiple-choice":
        names = list(batch)
        turned = [batch[name].roll(1, 0) for name in names]  # of other lengths
        pairs = zip(names, turned, strict=True)
        batch = {name: torch.stack([batch[name], other], 1) for name, other in pairs}
        batch["labels"] = torch.arange(rows) % 2
    else:
        batch["start_positions"] = torch.arange(rows) % 3
        batch["end_positions"] = torch.arange(rows) % 3 + 1
    return batch


__all__ = ["CASES", "PADDING", "SMALL_BERT", "WORDS", "make_batch", "make_model"]
