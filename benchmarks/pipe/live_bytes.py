"""Counts the bytes that autograd keeps for backward, now and at most."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
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


class LiveOutputs:
    """Bytes of the storages of all modules' outputs that are alive.

    Whoever holds them counts: a graph, an engine that keeps a stage's inputs for a
    recomputation, or a skip on its way. Outputs of recomputations count, too;
    gradients and what lives inside one module do not. Hooks slow the model down, so
    nothing is timed meanwhile.

    Args:
        model: Its modules are watched, itself included.
    """

    def __init__(self, model: nn.Module) -> None:
        self._alive: dict[int, int] = {}
        self._lock = threading.RLock()  # freeing one storage may free another
        self.now = 0
        self.peak = 0
        self._model = model

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Watch the modules inside; what is freed is counted always."""
        hooks = [
            module.register_forward_hook(self._see) for module in self._model.modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, module: nn.Module, inputs: object, outputs: object) -> None:
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, Tensor):
                self._take(tensor)

    def _take(self, tensor: Tensor) -> None:
        # The storage's Python object lives as long as the storage itself.
        storage = tensor.untyped_storage()
        pointer, num_bytes = storage.data_ptr(), storage.nbytes()
        with self._lock:
            if num_bytes == 0 or pointer in self._alive:
                return
            self._alive[pointer] = num_bytes
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, pointer)

    def _release(self, pointer: int) -> None:
        with self._lock:
            self.now -= self._alive.pop(pointer)
