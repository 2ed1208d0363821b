"""Codecs: how cached activations are kept in fewer bytes than they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from pipetransformer import _C
from pipetransformer.autocache.ragged import Ragged, dims_of, flags, moved

Codec = Literal["native", "bf16", "fp16", "int8"]

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
