"""Codecs: how cached activations are kept in fewer bytes than they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from pipetransformer import _C
from pipetransformer.autocache._ops import decode_rows, encode_rows
from pipetransformer.autocache.ragged import Ragged, dims_of, flags, moved
from pipetransformer.device import bring

Codec = Literal["native", "bf16", "fp16", "int8"]

_NUMBERS: dict[Codec, int] = {"bf16": 1, "fp16": 2, "int8": 3}  # of `_ops`

# Of the bytes of float32. An int8 row of n tokens also has 1/128 for outliers and 1/n
# for scales.
_SHARES: dict[Codec, float] = {"native": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.3}


# Relative, in norm: how far a record may be from its recomputation. Rounding itself is
# less, but a record of an earlier boundary takes it through layers.
TOLERANCES: dict[Codec, float] = {
    "native": 0.0,
    "bf16": 2.0**-5,
    "fp16": 2.0**-7,
    "int8": 0.1,
}


def usual_bytes(num_bytes: int, codec: Codec) -> int:
    """Return about how many bytes a codec makes of `num_bytes` of float32."""
    return max(1, round(num_bytes * _SHARES[codec]))


def round_trip(
    tensors: Sequence[Tensor],
    codec: Codec,
    *,
    ragged: Ragged | None = None,
    lengths: Tensor | None = None,
) -> list[Tensor]:
    """Return what would be read of records of `tensors`; padding stays as it is.

    Args:
        tensors: what crosses a boundary, each ``(rows, ...)``.
        codec: how they are kept.
        ragged: how the tensors are padded; None: they are not.
        lengths: with `ragged`, how many positions of each row are valid, ``(rows,)``
            int64.

    Returns:
        Tensors of the same shapes on the CPU, without gradients.

    Raises:
        ValueError: as `ActivationCache.store`.
    """
    if ragged is None:
        return _C.autocache.round_trip(list(tensors), codec, [], None)
    dims = dims_of(tensors, ragged.dim)
    padded = flags(dims)
    read = _C.autocache.round_trip(
        moved(tensors, dims), codec, padded, lengths if any(padded) else None
    )
    return moved(read, dims, back=True)


def is_lossy(codec: str) -> bool:
    """Tell whether it is the name of a codec that rounds."""
    return codec in _NUMBERS


def encoded_where_it_is(
    tensor: Tensor, lengths: Tensor | None, codec: Codec
) -> Tensor | _C.autocache.EncodedTensor:
    """Encode rows on their device and bring them to the host.

    Args:
        tensor: ``(rows, ...)``, with `lengths` padded along dim 1.
        lengths: how many positions of each row are valid, ``(rows,)`` int64; None: all.
        codec: one that rounds.

    Returns:
        What a store takes: rows that cannot be encoded are native, and the tensor
        itself if none can.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    lengths = None if lengths is None else lengths.cpu()
    encoded, offsets, kept = encode_rows(tensor, lengths, _NUMBERS[codec])
    kept = kept.cpu()
    if not kept.any():
        return tensor
    parts, absent = [encoded.cpu()], (~kept).nonzero().squeeze(1)
    if len(absent):
        native = tensor[absent.to(tensor.device)].cpu().contiguous()
        rows = native.view(torch.uint8).reshape(len(absent), -1)
        rows = functional.pad(rows, (0, -rows.shape[1] % 8))
        offsets[absent] = len(parts[0]) + rows.shape[1] * torch.arange(len(absent))
        parts.append(rows.flatten())
    codecs = torch.where(kept, _NUMBERS[codec], 0).to(torch.uint8)
    return _C.autocache.EncodedTensor(
        torch.cat(parts), offsets, codecs, list(tensor.shape[1:]), tensor.dtype
    )


def on_device(
    tensor: Tensor | _C.autocache.EncodedTensor,
    lengths: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Bring rows of records to a device, and decode there what is encoded.

    Args:
        tensor: of a fetch; what is encoded has been checked there.
        lengths: valid positions of each row, ``(rows,)`` int64; None: not ragged.
        device: where to.
    """
    if isinstance(tensor, Tensor):
        return bring(tensor, device)
    rows, _ = decode_rows(
        bring(tensor.bytes, device),
        tensor.offsets,
        tensor.codecs,
        None if tensor.fill is None else lengths,
        tensor.sizes,
        tensor.dtype,
        tensor.fill or 0.0,
    )
    return rows
