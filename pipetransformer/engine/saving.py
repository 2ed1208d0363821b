"""The part of the facade that writes and reads files: checkpoints and weights."""

from __future__ import annotations

import abc
import os

from torch import Tensor

from pipetransformer.checkpoint import content as persistence
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import tensor_files as files
from pipetransformer.loop.coordinator import Coordinator


class Saving(abc.ABC):
    """Checkpoints of a run, and the plain model's weights."""

    @abc.abstractmethod
    def _open(self) -> Coordinator:
        """Return the coordinator of the open engine; ValueError if it is closed."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; replica 0 alone writes, no other rank is needed.

        Raises:
            ValueError: no plan has been in force yet, or the path has no file's name.
            OSError: the file could not be written; what is there is whole.
        """
        coordinator = self._open()
        if coordinator.is_lead:
            persistence.save(coordinator.run, coordinator.replica, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a checkpoint, before the first pass; under any N, K and R.

        Raises:
            FileNotFoundError: no such file.
            OSError: the file could not be read; names it. MemoryError likewise.
            ValueError: a torn file, wrong values, another model, or a call after the
                first pass.
        """
        coordinator = self._open()
        if coordinator.has_plan:
            raise ValueError("load: expected a call before the first pass, got a later")
        content = checkpoint.read(path)
        persistence.restore(coordinator.run, path, content, lead=coordinator.is_lead)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the plain model's ``state_dict``, on the CPU.

        Names are those of the ``nn.Sequential`` that the engine was made with,
        whatever is frozen and however it is cut. No other rank is needed. After the
        ``with`` block ask the model itself, on the lead.

        Raises:
            ValueError: a rank that stands by: its weights are old.
        """
        coordinator = self._open()
        if coordinator.replica is None and not coordinator.is_lead:
            raise ValueError(
                f"state_dict of rank {coordinator.run.info.rank}: expected an active "
                "rank, got a standby; use engine.export, or ask the lead"
            )
        named = persistence.weights(coordinator.run)
        return {
            name: value.detach().to("cpu", copy=True) for name, value in named.items()
        }

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the plain model's ``state_dict``; replica 0 alone writes.

        The file loads without this library, into the model that the engine was made
        with: ``model.load_state_dict(torch.load(path, weights_only=True))``.

        Raises:
            ValueError: the path has no file's name.
            OSError: the file could not be written; what is there is whole.
        """
        coordinator = self._open()
        if coordinator.is_lead:
            files.write(path, persistence.weights(coordinator.run))
