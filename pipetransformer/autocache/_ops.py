"""The ops of this room, typed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer import _C  # noqa: F401  # loads the extension


def decode_rows(
    encoded: Tensor,
    offsets: Tensor,
    codecs: Tensor,
    lengths: Tensor | None,
    sizes: Sequence[int],
    dtype: torch.dtype,
    fill: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Decode rows of one tensor of a batch, on the device where their bytes are.

    Args:
        encoded: bytes of all rows, ``(n,)`` uint8.
        offsets: where each row begins, ``(rows,)`` int64 on the host, multiples of 8.
        codecs: how each row is encoded, ``(rows,)`` uint8 on the host: 0 native, 1
            bf16, 2 fp16, 3 int8.
        lengths: how many positions of its first dim each row has, ``(rows,)`` int64 on
            the host; None: all.
        sizes: of a row, with padding.
        dtype: of the result: float32, or with native and int8 rows one of 16 bits.
        fill: what stands behind a row's end.

    Returns:
        ``(rows, *sizes)`` of `dtype`, and ``(rows,)`` bool, which rows are encoded ones
        at all: what is returned of the others is worthless. Not differentiable.

    Raises:
        ValueError: an argument of another kind, or bytes that are not all there.
    """
    rows: tuple[Tensor, Tensor] = torch.ops.pipetransformer.decode_rows(
        encoded, offsets, codecs, lengths, sizes, dtype, fill
    )
    return rows


def encode_rows(
    rows: Tensor, lengths: Tensor | None, codec: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode rows of a tensor, on its device.

    Args:
        rows: ``(rows, ...)`` of any type.
        lengths: how many positions of dim 1 each row has, ``(rows,)`` int64 on the
            host; None: all.
        codec: 1 bf16, 2 fp16, 3 int8.

    Returns:
        Bytes ``(n,)`` uint8 on the device, offsets ``(rows,)`` int64 on the host, and
        ``(rows,)`` bool on the device: which rows are encoded. The bytes of the others,
        that the codec does not take or cannot hold, are worthless. Not differentiable.

    Raises:
        ValueError: an argument of another kind, or out of range.
    """
    encoded: tuple[Tensor, Tensor, Tensor] = torch.ops.pipetransformer.encode_rows(
        rows, lengths, codec
    )
    return encoded
