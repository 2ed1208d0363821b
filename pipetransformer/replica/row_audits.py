"""Computes rows again, apart from their batch, and compares them with records.

A row must not depend on its batch, or no record of it is worth anything. Which rows are
looked at: the first one that is to be kept, before it is; now and then one that was
found; with `debug` all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.autocache import (
    TOLERANCES,
    ActivationCache,
    Codec,
    Ragged,
    RaggedRows,
    Records,
    fingerprint_chain,
    valid_part,
)
from pipetransformer.core.devices import to_device
from pipetransformer.data.structures import rows_of, slice_rows, tensors_of
from pipetransformer.pipe import draw_scope
from pipetransformer.replica.differences import difference, other_kind
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.faulty_layer import faulty_layer
from pipetransformer.replica.frozen_layers import FrozenLayers
from pipetransformer.replica.in_place import run_in_place
from pipetransformer.replica.record_forms import RecordForms
from pipetransformer.report.clock import Clock
from pipetransformer.skip import SkipTracker, use_skip_tracker

_LOG = logging.getLogger(__name__)


class RowAudits:
    """Compares rows of a frozen prefix; what follows of it the caller decides.

    Args:
        layers: The frozen layers.
        frozen: Runs them.
        forms: Of what they hand on.
        clock: Is told what goes into computing rows again.
        seed: Seed of the random draws.
        ragged: How rows of different lengths are padded; None: they are not.
        debug: All that was found is computed again.
        own_bits: Records hold the very bits that layers of this run gave: what is
            checked in the shape it was computed in must be equal to the last bit.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        frozen: FrozenLayers,
        forms: RecordForms,
        clock: Clock,
        *,
        seed: int,
        ragged: Ragged | None,
        debug: bool,
        own_bits: bool,
    ) -> None:
        self.debug = debug
        self._layers = list(layers)
        self._frozen = frozen
        self._forms = forms
        self._clock = clock
        self._seed = seed
        self._ragged = ragged
        self._own_bits = own_bits
        self._narrowed: set[int] = set()  # of a row's lengths, those tried unpadded
        self._was_alone = False  # a row has been computed without its batch
        self._trying = threading.Lock()

    def passes(
        self,
        inputs: Any,
        found: Records,
        cache: ActivationCache,
        position: DrawPosition,
        codec: Codec,
    ) -> bool:
        """Compute a found row again; empty and leave the cache if it differs."""
        with self._clock.phase("audit"), self._frozen.awake():
            row = slice_rows(inputs, found.rows[:1])
            again = self._alone(row, found.boundary, cache, position)
            reason = self._apart(again, found, 0, codec)
        if reason is not None:
            cache.fail_audit(
                f"a sample computed again at boundary {found.boundary} differs from "
                f"its record ({reason}); its layers mix samples or padding, draw "
                "random numbers, or have changed"
            )
        return reason is None

    def check(
        self,
        inputs: Any,
        found: Records,
        ids: Tensor,
        cache: ActivationCache,
        position: DrawPosition,
        codec: Codec,
        *,
        whole: bool,
    ) -> None:
        """Compute all found rows again, in their batch and the first one alone.

        Raises:
            ValueError: one differs from its record.
        """
        cache.note_audited(len(found.rows))
        with self._clock.phase("audit"):
            batch = slice_rows(inputs, torch.arange(rows_of(inputs)))  # a copy
            again = self._frozen.run(batch, 0, position, whole, found.boundary)
            fresh = tensors_of(again)
            # Kernels of an accelerator may give other bits each time.
            exact = whole and self._own_bits and not found.lossy
            bits = exact and all(t.is_cpu for t in fresh)
            for number, row in enumerate(found.rows.tolist()):
                here = [tensor[row : row + 1] for tensor in fresh]
                reason = self._apart(here, found, number, codec, bits=bits)
                if reason is None and number == 0:
                    lone = slice_rows(inputs, found.rows[:1])
                    alone = self._alone(lone, found.boundary, cache, position)
                    reason = self._apart(alone, found, 0, codec)
                if reason is not None:
                    raise ValueError(
                        f"CacheConfig.debug: expected {cache.name_of(int(ids[row]))} "
                        f"computed again at boundary {found.boundary} as it is in the "
                        f"cache, got {reason}; {self._cause(inputs, row, position)}"
                    )

    def lone_row(
        self,
        inputs: Callable[[], Any],
        found: Sequence[Records],
        rows: int,
        cache: ActivationCache,
    ) -> tuple[Tensor, Any] | None:
        """Return a row to run alone, once: its place, and a copy of its inputs.

        The last row, which capacity limits leave out first; a copy, since layers may
        work in place. With `debug` hits are looked at, and the layer is named.
        """
        if self.debug or self._was_alone or not cache.audits or rows < 2:
            return None
        exact = torch.ones(rows, dtype=torch.bool)
        for records in found:
            if records.lossy:
                exact[records.rows] = False
        if not bool(exact.any()):
            return None
        last = exact.nonzero()[-1]
        return last, slice_rows(inputs(), last)

    def try_alone(
        self,
        lone: tuple[Tensor, Any],
        tensors: Sequence[Tensor],
        rows: RaggedRows | None,
        cache: ActivationCache,
        position: DrawPosition,
        refuse: Callable[[str], None],
    ) -> None:
        """Run a row without its batch, once; refuse if it differs from itself.

        Before the first record is stored: layers that mix the rows of a batch, or draw
        random numbers in eval mode, look like all others. Workers that come meanwhile
        wait until that has returned.
        """
        place, row = lone
        lengths = rows.own[place[0]].tolist() if rows is not None else None
        with self._clock.phase("audit"), self._trying:
            if self._was_alone:
                return
            try:
                with self._frozen.awake():
                    alone = self._alone(row, len(self._layers), cache, position)
            except torch.OutOfMemoryError:
                return  # later, perhaps
            except Exception as error:  # whatever layers raise for one row
                apart: str | None = f"{type(error).__name__}: {error}"
            else:
                here = [tensor[place] for tensor in tensors]
                apart = self._apart_from(alone, here, lengths)
            if apart is not None:
                refuse(
                    "a sample computed without its batch differs from itself there "
                    f"({apart}): layers mix samples or padding, or draw random "
                    "numbers; CacheConfig(debug=True) names the layer"
                )
            self._was_alone = True

    def not_narrowed(
        self,
        inputs: Callable[[], Any],
        rows: RaggedRows,
        cache: ActivationCache,
        position: DrawPosition,
    ) -> str | None:
        """Run a row with and without its padding, once; say what is not as promised.

        Sizes alone do not tell a padded dim from another one that is as large, and no
        batch may have other sizes. Valid positions that come last, and layers that read
        the padding, show in the values. Layers that take one length alone tell nothing.
        """
        ragged = self._ragged
        if ragged is None or len(self._narrowed) == len(rows.widths):
            return None
        for number, width in enumerate(rows.widths):
            own = rows.own[:, number]
            shorter = own < width
            if number in self._narrowed or not bool(shorter.any()):
                continue
            self._narrowed.add(number)
            longest = torch.where(shorter, own, 0).argmax().reshape(1)
            row, lengths = slice_rows(inputs(), longest), rows.own[longest[0]].tolist()
            with (
                self._clock.phase("audit"),
                self._frozen.awake(),
                self._scope(position),
            ):
                try:
                    cut = ragged.narrowed(row, tensors_of(row), lengths)
                    tensors = self._recorded(cut, cache)
                    reason = ragged.not_narrowed(tensors, lengths) if tensors else None
                    if tensors and reason is None:
                        padded = self._recorded(slice_rows(inputs(), longest), cache)
                        apart = difference(valid_part(padded, ragged, lengths), tensors)
                        reason = apart and (
                            "ragged: expected the valid positions in front, and the "
                            "same values for a row with its padding and without, got "
                            f"{apart}; pad behind (padding_side='right'), and give "
                            "layers a mask"
                        )
                except torch.OutOfMemoryError:
                    self._narrowed.discard(number)
                    continue
                except Exception as error:  # whatever layers raise for another length
                    _LOG.debug("a row without its padding: %s", error)
                    continue
            if reason is not None:
                return reason
        return None

    def _alone(
        self,
        row: Any,
        boundary: int,
        cache: ActivationCache,
        position: DrawPosition,
    ) -> list[Tensor]:
        """Compute a row without its batch: what a record of a boundary holds."""
        layers = self._layers[:boundary]
        with self._scope(position):
            value = self._frozen.here(run_in_place(layers, self._frozen.here(row)))
        if boundary < len(self._layers):
            return tensors_of(value)
        return self._forms.with_rows(value, cache)

    def _recorded(self, inputs: Any, cache: ActivationCache) -> list[Tensor]:
        """Run the layers; return what a record would hold, empty where it is none."""
        value = run_in_place(self._layers, self._frozen.here(inputs))
        return self._forms.with_rows(value, cache)

    @contextlib.contextmanager
    def _scope(self, position: DrawPosition) -> Iterator[None]:
        """Hold what frozen layers run in when they run apart from a step."""
        draws = draw_scope(
            self._seed, position.step, microbatch=position.first_microbatch, layer=0
        )
        with torch.no_grad(), draws, use_skip_tracker(SkipTracker()):
            yield

    def _apart(
        self,
        fresh: Sequence[Tensor],
        found: Records,
        number: int,
        codec: Codec,
        *,
        bits: bool = False,
    ) -> str | None:
        """Say how far a row is from its record, the `number`-th of those found."""
        lengths = None
        if found.lengths is not None:
            lengths = found.lengths[number].reshape(-1).tolist()
        cached = [tensor[number : number + 1] for tensor in found.tensors]
        rounded = TOLERANCES[codec] if found.lossy else 0.0
        return self._apart_from(fresh, cached, lengths, bits=bits, rounded=rounded)

    def _apart_from(
        self,
        fresh: Sequence[Tensor],
        cached: Sequence[Tensor],
        lengths: Sequence[int] | None,
        *,
        bits: bool = False,
        rounded: float = 0.0,
    ) -> str | None:
        """Say how far the valid parts of a row are apart.

        Layers may pad to the longest row of the batch, so padding may be shorter.
        """
        kinds = other_kind(fresh, cached)
        if kinds is not None and lengths is None:
            return kinds
        try:
            valid = [
                valid_part(each, self._ragged, lengths) for each in (fresh, cached)
            ]
        except (ValueError, RuntimeError, IndexError):
            if kinds is None:
                raise
            return kinds
        return difference(*valid, bits=bits, rounded=rounded)

    def _cause(self, inputs: Any, row: int, position: DrawPosition) -> str:
        """Say why a row computed again differs from its record, as far as it shows."""
        place = self._frozen.gather()  # the run ends
        now = fingerprint_chain(
            self._layers, len(self._layers), context=self._frozen.context()
        )
        for layer, (old, new) in enumerate(
            zip(self._frozen.fingerprints(), now, strict=True), -1
        ):
            if old != new:
                return f"layer {layer} was changed after the pass had begun"

        def scope(number: int) -> contextlib.AbstractContextManager[None]:
            step = position.step + number
            return self._scope(dataclasses.replace(position, step=step))

        def differ(ours: Sequence[Tensor], alone: Sequence[Tensor]) -> str | None:
            if other_kind(alone, ours) is None:
                return difference(alone, ours)
            return self._apart_from(alone, ours, lengths)

        layers, here = self._layers, to_device(inputs, place)
        rows = None
        if self._ragged is not None:
            rows = self._ragged.rows_of(inputs, tensors_of(inputs))
        lengths = None if rows is None else rows.own[row].tolist()
        found = faulty_layer(layers, here, row, scope=scope, differ=differ)
        return found or (
            "no layer gives other values when it runs again or alone: its code has "
            "changed since the record was made, or its values depend on more than "
            "its inputs, weights and settings"
        )
