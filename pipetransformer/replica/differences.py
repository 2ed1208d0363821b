"""How far what was computed again is from what a record holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Relative, of what another number of rows in a batch makes of rounding.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_COARSE = 1e-1
_NOTHING = 1e-30  # where a tensor is all zeros
# What counts of a value where others may cancel: masks hold the largest there are.
_LARGEST = 1e3


def other_kind(fresh: Sequence[Tensor], cached: Sequence[Tensor]) -> str | None:
    """Say how the kinds of tensors differ, or None."""
    if cached and not fresh:
        return "another structure or other fixed values"
    kinds = [
        ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        for tensors in (fresh, cached)
    ]
    return None if kinds[0] == kinds[1] else f"{kinds[0]}; recorded {kinds[1]}"


def difference(
    fresh: Sequence[Tensor],
    cached: Sequence[Tensor],
    *,
    bits: bool = False,
    rounded: float = 0.0,
) -> str | None:
    """Say which tensor is apart beyond rounding, and how far, or None.

    Args:
        fresh: Computed again.
        cached: From a record.
        bits: Rounding counts, too.
        rounded: How far the record may be off because of its codec, relative.
    """
    if (reason := other_kind(fresh, cached)) is not None:
        return reason
    floor = 0.0 if bits else _rounding_of(fresh)
    for number, (one, other) in enumerate(zip(fresh, cached, strict=True)):
        one, other = one.detach().cpu(), other.cpu()
        where = f"tensor {number}: "
        if one.is_complex():
            one, other = (torch.view_as_real(t.resolve_conj()) for t in (one, other))
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"{where}{int((one != other).sum())} of {one.numel()} values"
            continue
        allowed = 0.0 if bits else _TOLERANCES.get(one.dtype, _COARSE) + rounded
        one, other = one.double(), other.double()
        # Equal infinities, as masks hold them, have no difference to speak of.
        differs = (one != other) & ~(one.isnan() & other.isnan())
        apart = (one - other)[differs].norm()
        size = one[one.isfinite()].norm()
        beside = floor if fresh[number].dtype in _TOLERANCES else 0.0
        if not apart <= size * allowed + max(beside, 0.0 if bits else _NOTHING):
            return (
                f"{where}norm of the difference {apart:.3g}, of the values {size:.3g}"
            )
    return None


def _rounding_of(tensors: Sequence[Tensor]) -> float:
    """Return how far a tensor may be off where others cancel in it.

    Of float32 and float64: in 16 bits that is as much as small tensors hold.
    """
    most = 0.0
    for tensor in tensors:
        if tensor.dtype in _TOLERANCES:
            held = tensor.detach()
            held = held[held.isfinite()].clamp(-_LARGEST, _LARGEST)
            size = float(held.double().norm())
            most = max(most, 4 * torch.finfo(tensor.dtype).eps * size)
    return most
