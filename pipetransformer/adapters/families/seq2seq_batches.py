"""What a batch of a model with an encoder and a decoder lacks, and its padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipetransformer.adapters.families.seq2seq_parts import Batch, State
from pipetransformer.autocache import Ragged

_IGNORED = -100


def shifted(config: Any, labels: Tensor) -> Tensor:
    """Return decoder inputs: the labels behind the token that decoding starts with."""
    start = _token(config, "decoder_start_token_id")
    moved = functional.pad(labels[:, :-1], (1, 0), value=start)
    return moved.masked_fill(moved == _IGNORED, _token(config, "pad_token_id"))


def rotated(config: Any, labels: Tensor) -> Tensor:
    """Return decoder inputs: the labels behind their last token, the language."""
    pad = _token(config, "pad_token_id")
    ids = labels.masked_fill(labels == _IGNORED, pad)
    last = (ids.ne(pad).sum(1, keepdim=True) - 1).clamp(min=0)
    return torch.cat([ids.gather(1, last), ids[:, :-1]], 1)


def _token(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(
            f"config.{name}: expected a token id, from which decoder_input_ids are "
            "made of labels, got None"
        )
    return int(value)


def completed(
    shift: Callable[[Any, Tensor], Tensor],
    drop: tuple[str, ...],
    config: Any,
    batch: Batch,
) -> Batch:
    """Return a batch with all that the first layer takes.

    Args:
        shift: Makes decoder inputs of labels, as the model does.
        drop: Entries that the model does not use.
        config: Of the model.
        batch: As a data collator makes it.

    Raises:
        ValueError: it has neither labels nor decoder inputs.
    """
    full = {name: value for name, value in batch.items() if name not in drop}
    labels = batch.get("labels")
    if full.get("decoder_input_ids") is None:
        if not isinstance(labels, Tensor):
            raise ValueError(
                "batch: expected labels as a tensor, or decoder_input_ids, got "
                f"{', '.join(sorted(batch))}"
            )
        full["decoder_input_ids"] = shift(config, labels)
    ids = full["decoder_input_ids"]
    if not isinstance(ids, Tensor):
        return full  # refused with the others
    mask = full.setdefault("decoder_attention_mask", torch.ones_like(ids))
    if not isinstance(mask, Tensor):
        return full
    valid = mask != 0
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        # Behind a row's last label nothing counts: attention is causal.
        named = "decoder_attention_mask" in batch
        valid = (labels != _IGNORED) | (valid & named)
    full["decoder_lengths"] = _ends(valid)
    return full


def _ends(there: Tensor) -> Tensor:
    """Return where the last True of each row ends, ``(rows,)`` int64."""
    ends = torch.arange(1, there.shape[1] + 1, device=there.device)
    return (there * ends).amax(1)


_TARGET = ("decoder_input_ids", "decoder_attention_mask", "decoder_lengths")
TEXT = ("input_ids", *_TARGET, "attention_mask")
SPEECH = ("input_features", *_TARGET)


def _text_lengths(inputs: State) -> Tensor:
    return torch.stack([_ends(inputs[4] != 0), inputs[3]], 1)


def _target_lengths(inputs: State) -> Tensor:
    return inputs[3]


# Behind the end of a target its mask stays True, as in a batch that names none: a
# kernel for causal attention without a mask is then the same, found or computed.

TEXT_PADDING = Ragged(
    _text_lengths,
    dim=(1, 1, 1, 1),
    fill=(0.0, 0.0, 1.0, 0.0),
    input_dim=(1, 1, 1, None, 1),
    which=(0, 1, 1, 0),
    input_which=(0, 1, 1, 1, 0),
)
T5_PADDING = dataclasses.replace(
    TEXT_PADDING, dim=(1, 1, 1, 1, None), which=(0, 1, 1, 0, 0)
)
SPEECH_PADDING = Ragged(
    _target_lengths,
    dim=(None, 1, 1),
    fill=(0.0, 0.0, 1.0),
    input_dim=(None, 1, 1, None),
)
