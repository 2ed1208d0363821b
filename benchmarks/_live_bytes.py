"""Counts the bytes that autograd keeps for backward, now and at most."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class LiveBytes:
    """Bytes of storages that graphs hold as saved tensors.

    A storage counts once, however many tensors and views of it are saved. Safe to use
    from several threads.

    Args:
        excluded: Tensors whose storages live anyway: parameters and inputs.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = {_storage(tensor)[0] for tensor in excluded}
        self._holders: dict[int, int] = {}
        self._lock = threading.Lock()
        self.now = 0
        self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved inside; what is freed is counted always."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | _Held:
        pointer, num_bytes = _storage(tensor)
        if pointer in self._excluded:
            return tensor
        with self._lock:
            holders = self._holders.get(pointer, 0)
            self._holders[pointer] = holders + 1
            if holders == 0:
                self.now += num_bytes
                self.peak = max(self.peak, self.now)
        # Detached: with its graph a saved output would keep that graph, and itself.
        return _Held(self, tensor.detach())

    def release(self, tensor: Tensor) -> None:
        """Take one saved tensor off."""
        pointer, num_bytes = _storage(tensor)
        with self._lock:
            self._holders[pointer] -= 1
            if self._holders[pointer] == 0:
                del self._holders[pointer]
                self.now -= num_bytes


class _Held:
    """A saved tensor; it is taken off when the graph lets go of it."""

    def __init__(self, owner: LiveBytes, tensor: Tensor) -> None:
        self._owner = owner
        self.tensor = tensor

    def __del__(self) -> None:
        self._owner.release(self.tensor)


def _unpack(held: Tensor | _Held) -> Tensor:
    return held.tensor if isinstance(held, _Held) else held


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
