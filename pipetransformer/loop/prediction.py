"""Outputs of a whole set, in its order, brought to the lead or to every active rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipetransformer.autodp import ActiveGroup, gather_at
from pipetransformer.loop.microbatches import (
    FixedSet,
    evaluating,
    forward_share,
    packed,
    unpacked,
)
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run

Receivers = Literal["lead", "all"]

_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclasses.dataclass
class Prediction:
    """One call of ``engine.predict`` on one rank.

    Attributes:
        samples: The set.
        postprocess: Takes the outputs of a micro-batch; None: they are the result.
        to: Who gets the result.
    """

    samples: FixedSet
    postprocess: Callable[[Any], Any] | None
    to: Receivers
    _kept: list[Any] = dataclasses.field(default_factory=list)  # one: the result

    @property
    def result(self) -> Any:
        """The result, on ranks that it was brought to; else None."""
        return self._kept[0] if self._kept else None

    def advance(self, run: Run, replica: Replica) -> bool:
        """Predict, and bring the result to who needs it; collective.

        Call it until it returns True. A rank that held the result, or got it alone,
        may be lost between two calls: then the next call predicts again.

        Returns:
            Whether each rank that needs the result had it before this call; equal on
            all active ranks.
        """
        group = replica.group
        needs = self.to == "all" or group.rank == 0
        told = b"yes" if self._kept or not needs else b"no"
        have = gather_at(group, f"predict of {len(self.samples)} samples", told)
        if b"no" not in have:
            return True
        with evaluating(run, replica, self.samples):
            pieces = forward_share(
                run,
                replica,
                self.samples,
                divide=lambda batch: (run.arguments.division.inputs(batch), None),
                keep=self._piece,
            )
            _compare_forms(group, pieces)
            own = [_joined(pieces)] if pieces else []
            parts = _brought(group, own, needs)
            self._kept = [_joined(parts)] if needs else []
        return False

    def _piece(self, outputs: Any, _: Any, rows: int) -> Any:
        value = outputs if self.postprocess is None else self.postprocess(outputs)
        return _checked(value, rows)


def _brought(group: ActiveGroup, own: list[Any], needs: bool) -> list[Any]:
    """Return the shares of all replicas in their order, to a rank that needs them."""
    if group.size == 1:
        return own
    mine, parts = packed(own), []
    for source in range(group.size):
        told = group.broadcast_bytes(mine, source)
        if needs:
            parts += unpacked(told)
    return parts


def _checked(value: Any, rows: int) -> Any:
    """Return a piece of the result, its tensors on the host and of its own memory.

    Raises:
        ValueError: a part of it has other than `rows` rows or entries.
        TypeError: it holds something that is no tensor and no plain value.
    """
    if isinstance(value, Mapping):
        return {key: _checked_part(part, rows) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_checked_part(part, rows) for part in value)
    if isinstance(value, Tensor):
        found = len(value) if value.dim() else 0
    elif isinstance(value, list):
        found = len(value)
    else:
        raise TypeError(
            "predict: expected tensors, tuples or mappings of them, or lists with one "
            f"entry per row, got {type(value).__name__}; let postprocess return such"
        )
    if found != rows:
        raise ValueError(
            f"predict: expected {rows} rows in each tensor and list, one per sample, "
            f"got {found}; let postprocess return such"
        )
    return _plain(value)


def _checked_part(value: Any, rows: int) -> Any:
    """Return a part of a tuple or mapping, which may be None."""
    return None if value is None else _checked(value, rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if type(value) not in _PLAIN:
        raise TypeError(
            "predict: expected entries of tensors and plain values, got "
            f"{type(value).__name__}; let postprocess return such"
        )
    return value


def _compare_forms(group: ActiveGroup, pieces: Sequence[Any]) -> None:
    """Refuse pieces that do not fit together, on every active rank alike."""
    mine = "\n".join(sorted({_form(piece) for piece in pieces}))
    told = group.all_gather_bytes(mine.encode())
    forms = sorted({form for part in told for form in part.decode().splitlines()})
    if len(forms) > 1:
        raise ValueError(
            "predict: expected outputs of micro-batches that differ in rows alone, got "
            f"{' and '.join(forms[:2])}; let postprocess return what has the same "
            "shape everywhere, or a list with one entry per row"
        )


def _form(value: Any) -> str:
    """Describe what two pieces that can be joined have in common."""
    if isinstance(value, Tensor):
        shape = ", ".join(["rows", *map(str, value.shape[1:])])
        return f"{str(value.dtype).removeprefix('torch.')} ({shape})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_form(v)}' for k, v in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_form, value))})"
    return "None" if value is None else "list"


def _joined(pieces: Sequence[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces))
    if isinstance(first, dict):
        return {key: _joined([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(column) for column in zip(*pieces, strict=True))
    if first is None:
        return None
    return [entry for piece in pieces for entry in piece]
