"""What a record holds of the value at a boundary, and that value from records.

Records hold tensors with rows. What else layers hand on is fixed (`handed_on`), and
rows of several lengths are kept without their padding (`Ragged`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import (
    ActivationCache,
    Codec,
    Ragged,
    RaggedRows,
    Records,
    round_trip,
    unfit,
)
from pipetransformer.data.structures import flat_tensors, tensors_of
from pipetransformer.replica.handed_on import Form, HandedOn


class RecordForms:
    """The forms of what the frozen layers hand on, one for each set of records.

    Args:
        ragged: How rows of different lengths are padded; None: they are not.
    """

    def __init__(self, ragged: Ragged | None) -> None:
        self._ragged = ragged
        # Workers look them up for several micro-batches at once.
        self._known: weakref.WeakKeyDictionary[ActivationCache, tuple[Form, str]] = (
            weakref.WeakKeyDictionary()  # sets may be of other shapes
        )

    def __len__(self) -> int:
        """Return of how many sets of records the form is known."""
        return len(self._known)

    def clear(self) -> None:
        """Forget them: the layers are others."""
        self._known.clear()

    def chain(self, layers: Sequence[int], cache: ActivationCache) -> list[int]:
        """Return the fingerprints of records: of rows alone, if the rest is known.

        Args:
            layers: Fingerprints of the layers, by boundary.
            cache: The records.
        """
        known = self._known.get(cache)
        if known is None:
            return list(layers)
        return [*layers[:-1], hash_bytes(f"{layers[-1]} {known[1]}".encode())]

    def storable(
        self, value: Any, rows: int, cache: ActivationCache
    ) -> tuple[Tensor, ...] | None:
        """Return what a record holds; None: it could not be made whole again."""
        if isinstance(value, HandedOn):
            form, text = value.form, value.form.text()
            # A batch of rows that were padded to another length may have others.
            varies = self._ragged is not None and not self._ragged.fixed
            if text is None or (varies and form.has_numbers()):
                return None
            if text != self._known.setdefault(cache, (form, text))[1]:
                return None
            value = value.tensors
        elif cache in self._known:
            return None
        return flat_tensors(value, rows)

    def with_rows(self, value: Any, cache: ActivationCache) -> list[Tensor]:
        """Return what a record holds of a value at the boundary; empty: not this."""
        known = self._known.get(cache)
        if known is None:
            return tensors_of(value)
        form = known[0]
        return list(form.rows_of(value)) if form.fits(value) else []

    def as_read(self, tensors: Sequence[Tensor], cache: ActivationCache) -> Any:
        """Return the value at the boundary that the tensors of a record stand for."""
        known = self._known.get(cache)
        if known is not None:
            return HandedOn(tuple(tensors), known[0])
        return flat(tensors)

    def misfit(
        self, tensors: Sequence[Tensor], ragged: RaggedRows | None
    ) -> str | None:
        """Say why records cannot hold these tensors, or None."""
        reason = unfit(tensors)
        if reason is not None or self._ragged is None or ragged is None:
            return reason
        return self._ragged.misfit(tensors, ragged.widths)

    def joined(
        self, tensors: Sequence[Tensor], ragged: RaggedRows | None
    ) -> Sequence[Tensor]:
        """Return tensors at the boundary as records hold them."""
        if self._ragged is None or ragged is None:
            return tensors
        return self._ragged.joined(tensors, ragged)

    def parted(self, found: Records, ragged: RaggedRows | None) -> Records:
        """Return records of rows with several lengths, each tensor of its own."""
        if self._ragged is None or ragged is None or not self._ragged.has_several:
            return found
        tensors = tuple(self._ragged.parted(found.tensors, ragged))
        own = ragged.own[found.rows]
        return dataclasses.replace(found, tensors=tensors, lengths=own)

    def rounded(
        self,
        value: Any,
        rows: int,
        cache: ActivationCache,
        codec: Codec,
        ragged: RaggedRows | None,
    ) -> Any:
        """Return what a codec makes of activations; None: they cannot be stored."""
        tensors = self.storable(value, rows, cache)
        if tensors is None or self.misfit(tensors, ragged) is not None:
            return None
        lengths = ragged.lengths if ragged is not None else None
        kept = self.joined(tensors, ragged)
        read = round_trip(kept, codec, ragged=self._ragged, lengths=lengths)
        if self._ragged is not None and ragged is not None:
            read = list(self._ragged.parted(read, ragged))
        return self.as_read(read, cache)


def flat(tensors: Sequence[Tensor]) -> Any:
    """Return tensors as layers hand them on: one alone, several in a tuple."""
    return tuple(tensors) if len(tensors) > 1 else tensors[0]
