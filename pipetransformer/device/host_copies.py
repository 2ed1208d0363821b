"""What the training loop hands to devices, and reads from them, without a halt.

A plain ``tensor.to(device)`` runs on the stream that computes: the host waits until all
that was queued there before is done. Here copies have streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipetransformer import _C
from pipetransformer.core.containers import map_tensors

_T = TypeVar("_T")

_COPIES = _C.device.HostCopies()


def bring(tree: _T, device: torch.device) -> _T:
    """Return a structure whose tensors are on a device.

    The host waits until its own tensors have been read, and for nothing that is queued
    on the device.

    Args:
        tree: A tensor, or tensors in tuples, lists and mappings; other values stay.
        device: Where to.

    Returns:
        The same structure; itself where every tensor is there already.
    """
    if isinstance(tree, Tensor) and tree.device == device:
        return tree  # most often there is nothing to do
    computes = device.type not in ("cpu", "meta")

    def brought(value: Tensor) -> Tensor:
        # Of a subclass nobody knows what memory it has.
        plain = type(value) is Tensor and value.layout == torch.strided
        if computes and plain and value.is_cpu and not value.requires_grad:
            return _COPIES.bring(value, device)
        return value.to(device)

    moved: _T = map_tensors(tree, brought)
    return moved


def wait_for_queued(devices: Iterable[torch.device]) -> None:
    """Let the host wait for what is queued on the current streams of devices."""
    for mark in [_COPIES.mark(device) for device in devices]:
        mark.wait()


class LaterNumber:
    """A number on its way to the host: whoever reads it waits for it alone.

    Args:
        value: ``()``; written by what is queued on the current stream of its device.
            A copy is kept: it may be changed.
    """

    def __init__(self, value: Tensor) -> None:
        self._number: float | None = None
        self._queued: tuple[Tensor, Any] | None = None
        if value.is_cpu:
            self._number = float(value.item())
        else:
            self._queued = value.detach().clone(), _COPIES.mark(value.device)

    @property
    def is_known(self) -> bool:
        """Whether reading it waits for nothing."""
        return self._number is not None

    def read(self) -> float:
        """Return it."""
        if self._queued is not None:
            self._number = float(_COPIES.read(*self._queued))
            self._queued = None
        if self._number is None:
            raise RuntimeError("number of no tensor; please report")
        return self._number
