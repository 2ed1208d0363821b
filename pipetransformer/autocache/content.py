"""Hashes of what tensors hold, whatever they keep it in."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer import _C

_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is one piece of memory, seen by its strides."""
    is_wrapper = hasattr(type(tensor), "__tensor_flatten__")
    return tensor.layout == torch.strided and not (tensor.is_meta or is_wrapper)


def hash_content(tensor: Tensor, seed: int) -> int | None:
    """Hash a tensor's dtype, shape and values.

    Args:
        tensor: A plain one, a sparse one, or a wrapper of such, as quantised weights
            are.
        seed: Of the hash, in ``0 .. 2**64 - 1``.

    Returns:
        The hash, in ``0 .. 2**64 - 1``; None where there is nothing to read, as of
        tensors on the meta device.
    """
    if is_plain(tensor):
        return _C.autocache.hash_tensor(tensor, seed)
    parts = _parts_of(tensor)
    if parts is None:
        return None
    text, inner = parts
    found: int | None = _C.core.hash_bytes(
        f"{text} {tuple(tensor.shape)}".encode(), seed
    )
    for part in inner:
        if found is not None:
            found = hash_content(part, found)
    return found


def _parts_of(tensor: Tensor) -> tuple[str, Sequence[Tensor]] | None:
    """Return what a tensor is made of besides these tensors; None: nobody can tell."""
    if tensor.is_meta:
        return None
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        text = f"{type(tensor).__qualname__} {names} {context}"
        return without_addresses(text), [getattr(tensor, name) for name in names]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return str(tensor.layout), [whole.indices(), whole.values()]
    if tensor.layout in _COMPRESSED:
        rows, columns = tensor.crow_indices(), tensor.col_indices()
        return str(tensor.layout), [rows, columns, tensor.detach().values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        columns, rows = tensor.ccol_indices(), tensor.row_indices()
        return str(tensor.layout), [columns, rows, tensor.detach().values()]
    return None


def without_addresses(text: str) -> str:
    """Return a ``repr`` without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
