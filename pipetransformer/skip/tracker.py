"""Where skip tensors lie between stash and pop: one tracker per thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from pipetransformer.skip.namespace import Namespace


class SkipTracker:
    """Holds each stashed tensor until it is popped, and no longer."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Namespace | None, str], torch.Tensor | None] = {}

    def save(
        self, namespace: Namespace | None, name: str, tensor: torch.Tensor | None
    ) -> None:
        """Keep ``tensor`` under a name; replaces what lies there."""
        self._tensors[namespace, name] = tensor

    def load(self, namespace: Namespace | None, name: str) -> torch.Tensor | None:
        """Hand out a tensor and forget it.

        Raises:
            RuntimeError: if nothing lies under that name.
        """
        if (namespace, name) not in self._tensors:
            raise RuntimeError(
                f"skip {name!r}: expected a tensor or None stashed before the pop and "
                f"popped once, got nothing in namespace {namespace}"
            )
        return self._tensors.pop((namespace, name))

    def load_all(self) -> dict[tuple[Namespace | None, str], torch.Tensor | None]:
        """Hand out all tensors by namespace and name, and forget them."""
        tensors, self._tensors = self._tensors, {}
        return tensors

    def __len__(self) -> int:
        return len(self._tensors)


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """Return the tracker of this thread, where skippable layers stash and pop."""
    return _current.tracker


@contextlib.contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """Let the skippable layers of this thread use ``tracker`` for the context."""
    before = _current.tracker
    _current.tracker = tracker
    try:
        yield
    finally:
        _current.tracker = before
