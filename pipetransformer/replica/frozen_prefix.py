"""The frozen prefix: cache look-up, and the forward of what the cache lacks.

Frozen layers run once per sample (`frozen_layers`), and what they return is kept. What
is read of records is on the first device. A record found at an earlier boundary is
advanced: only the layers behind that boundary run. Where nothing is cached, a plan may
have the workers run them for the next batch whenever they wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import (
    ActivationCache,
    Codec,
    Ragged,
    RaggedRows,
    Records,
    cacheable,
    hash_ragged_rows,
    hash_rows,
)
from pipetransformer.core.devices import HOST
from pipetransformer.data.structures import (
    fit_together,
    join_rows,
    slice_rows,
    tensors_of,
)
from pipetransformer.pipe import Workers
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.drift import Drift
from pipetransformer.replica.frozen_layers import FrozenLayers
from pipetransformer.replica.handed_on import (
    as_given,
    beside_tensors,
    of_one_form,
)
from pipetransformer.replica.record_forms import RecordForms, flat
from pipetransformer.replica.row_audits import RowAudits
from pipetransformer.report.clock import Clock

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")


class FrozenPrefix:
    """Layers ``[0, boundary)`` of the model, with an optional cache.

    Args:
        layers: All layers of the user's Sequential.
        boundary: Number of frozen layers, >= 1; they must be in eval mode. No skip
            goes past it.
        workers: The pipeline's workers; misses are spread over them.
        clock: Is told what goes into reading, computing and writing.
        devices: Of the workers, in their order.
        places: The device of each frozen layer. On several of them: micro-batches pass
            these. None: all are on the first.
        num_microbatches: Micro-batches that pass them; with `fills` all of them.
        fills: Workers run the layers for a batch to come while they wait, see
            `run_ahead`. Of a host's slots alone, and with several of them.
        seed: Seed of the random draws.
        ragged: How rows of different lengths are padded; None: they are not.
        debug: Compute all that was found again, and raise where it differs.
        own_bits: Records hold the very bits that layers of this run gave: what is
            checked in the shape it was computed in must be equal to the last bit.
        admitted: Tells whether the cache is worth its use at present; where it is not,
            nothing is read or written.
        disk_admitted: The same of what it has on disk.
        place: Moves the layers to devices, one each, and nothing else.
        hold_still: Puts the layers back into eval mode if something has switched them
            to training.
        device_bytes: Memory on the first device for copies of training records.
        sharers: Replicas of the plan, which share its samples.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        boundary: int,
        workers: Workers,
        clock: Clock,
        *,
        devices: Sequence[torch.device] = (HOST,),
        places: Sequence[torch.device] | None = None,
        num_microbatches: int = 1,
        fills: bool = False,
        seed: int,
        ragged: Ragged | None = None,
        debug: bool = False,
        own_bits: bool = False,
        admitted: Callable[[], bool] = lambda: True,
        disk_admitted: Callable[[], bool] = lambda: True,
        place: Callable[[Sequence[torch.device]], None] = lambda _: None,
        hold_still: Callable[[], None] = lambda: None,
        device_bytes: int = 0,
        sharers: int = 1,
    ) -> None:
        self.boundary = boundary
        self._layers = list(layers)[:boundary]
        self._frozen = FrozenLayers(
            self._layers,
            workers,
            clock,
            devices=devices,
            places=places,
            num_microbatches=num_microbatches,
            fills=fills,
            seed=seed,
            place=place,
            hold_still=hold_still,
            padding=_padding(ragged),
        )
        self._forms = RecordForms(ragged)
        self._audits = RowAudits(
            self._layers,
            self._frozen,
            self._forms,
            clock,
            seed=seed,
            ragged=ragged,
            debug=debug,
            own_bits=own_bits,
        )
        self._drift = Drift(self._layers)
        self._clock = clock
        self._ragged = ragged
        self._admitted = admitted
        self._disk_admitted = disk_admitted
        self._device_bytes = device_bytes
        self._sharers = sharers
        self._copied_from: ActivationCache | None = None
        self._length: int | None = None  # padded, of the last training inputs
        self._shapes: list[torch.Size] | None = None  # of the last inputs' rows
        self.refusal = cacheable(self._layers)
        self._is_cacheable = self.refusal is None
        if self.refusal is not None:
            _LOG.warning("frozen prefix is not cached: %s", self.refusal)
        self.refresh()

    @property
    def wants_cache(self) -> bool:
        """Whether there is to be one: the same on every rank of the plan."""
        return self._is_cacheable and self._admitted()

    @property
    def uses_cache(self) -> bool:
        """Whether activations are cached: nothing that was seen here forbids it."""
        return self.refusal is None and self._admitted()

    @property
    def uses_disk(self) -> bool:
        """Whether they are on disk, too, where there is one."""
        return self.uses_cache and self._disk_admitted()

    def begin_pass(self, counts: tuple[int, int] = (0, 0), views: int = 1) -> None:
        """Note that a pass over the training set begins.

        The layers leave the devices if the pass before has needed none.

        Args:
            counts: As for `Drift.begin_pass`.
            views: After how many passes samples come again.
        """
        self._frozen.begin_pass()
        self.refresh()
        if self.uses_cache:
            self._drift.begin_pass(self._frozen.fingerprints(), counts, views)

    def refresh(self) -> None:
        """Fingerprint the frozen weights again; call it before each pass.

        Records of weights that something has changed since then become misses.
        """
        if self._frozen.refresh():
            self._forms.clear()

    @property
    def fills(self) -> bool:
        """Whether workers run the layers for a batch to come, see `run_ahead`."""
        return self._frozen.fills

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Hold the layers where they compute."""
        return self._frozen.awake()

    def spread(self, function: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Call a function with each item, on the workers where these compute."""
        return self._frozen.spread(function, items)

    def _use_device(self, cache: ActivationCache) -> None:
        if self._device_bytes and self._copied_from is not cache:
            self._copied_from = cache
            cache.use_device(
                self._frozen.device, self._device_bytes, sharers=self._sharers
            )

    def retire(self) -> None:
        """Give back what is on the device for this prefix alone.

        No worker runs the layers any more, so they may be trained again.
        """
        self._frozen.give_up_ahead()
        if self._copied_from is not None:
            self._copied_from.use_device(self._frozen.device, 0)
            self._copied_from = None

    def _record_chain(self, cache: ActivationCache) -> list[int]:
        return self._forms.chain(self._frozen.fingerprints(), cache)

    def __call__(
        self,
        inputs: Callable[[], Any],
        ids: Tensor | None,
        cache: ActivationCache | None,
        *,
        position: DrawPosition,
        keys: Tensor | None = None,
        lazy: bool = False,
        view: int = 0,
        write: bool = True,
        whole: bool = False,
        codec: Codec = "native",
        compare: Callable[[Any, Any], None] | None = None,
    ) -> Any:
        """Return the activations at the boundary for one batch.

        Args:
            inputs: Gives the batch's inputs; called only when they are needed.
            ids: Sample ids, ``(rows,)`` int64; None recomputes everything.
            cache: The slab of the ids' space; None recomputes everything.
            position: Keys of the random draws; with `whole` the batch is the
                micro-batch that it names.
            keys: The dataset's own input keys, ``(rows,)`` int64; None hashes the
                input bytes.
            lazy: Samples are loaded and stacked only when `inputs` is called, so all
                batches have one length.
            view: Number of the view that the samples are in.
            write: Store what was computed; off when nothing will read it again.
            whole: Compute the batch as one micro-batch of unchanged shape unless
                every row is found at one boundary, so that a row's bits do not
                depend on which rows were found.
            codec: What records are read and written in.
            compare: Decides on the codec: is called with the activations as they are
                and as they would be read. Those as they are are returned and stored.
                None: it is decided.

        Returns:
            What the last frozen layer returns: a tensor or a tuple of tensors with
            ``rows`` rows, or a structure with fixed values; tensors among these are
            `NoChunk`.

        Raises:
            TypeError: something in that structure has no rows and is not fixed.
            ValueError: with `debug`, a row computed again differs from its record.
        """
        if cache is None or ids is None or not self._reads(cache):
            if self.fills and ids is not None and not whole:
                taken = self._frozen.run_filled(inputs(), ids, position=position)
                return as_given(taken)
            return as_given(self._frozen.run(inputs(), 0, position, whole))
        if not whole:
            self._use_device(cache)
        ids = cache.record_ids(ids, view)
        with self._clock.phase("cache_read"):
            rows, length = None, self._length if lazy else None
            if self._ragged is not None and (
                length is None or self._ragged.has_several
            ):
                rows = self._rows(inputs(), keep=not whole)
                length = rows.padded
            hashes = None if keys is None else _with_padding(keys, rows)
            if hashes is None:
                hashes = self._hashes(inputs(), rows, cache)
            if hashes is None:
                return as_given(self._frozen.run(inputs(), 0, position, whole))
            found = cache.fetch(
                ids,
                chain=self._record_chain(cache),
                input_hashes=hashes,
                ragged=self._ragged,
                length=length,
                codec=codec,
                disk=self.uses_disk,
                device=self._frozen.device,
            )
            found = [self._forms.parted(records, rows) for records in found]
        if self._audits.debug:
            for records in found:
                self._audits.check(
                    inputs(), records, ids, cache, position, codec, whole=whole
                )
        elif (
            found
            and cache.audit_due()
            and not self._audits.passes(inputs(), found[0], cache, position, codec)
        ):
            if cache.given_up is not None:
                return as_given(self._frozen.run(inputs(), 0, position, whole))
            found = []  # those of earlier runs; what is computed takes their place
        complete = len(found) == 1 and len(found[0].rows) == len(ids)
        if whole and not complete:
            found = []
        if complete and found[0].boundary == self.boundary and compare is None:
            return as_given(self._advance(found[0], cache, position, whole))
        if self._ragged is not None and rows is None:
            rows = self._rows(inputs(), keep=not whole)
            hashes = hashes if keys is None else _with_padding(keys, rows)
        lone = self._audits.lone_row(inputs, found, len(ids), cache) if write else None
        parts = self._assemble(inputs, found, len(ids), cache, position, whole)
        values = [value for _, value in parts]
        if not fit_together(values) or not of_one_form(values):
            # Padded to the longest row of other batches: nothing found is of use.
            found = []
            parts = self._assemble(inputs, [], len(ids), cache, position, whole)
        result = parts[0][1] if len(parts) == 1 else _merge(parts, len(ids))
        if compare is not None:
            served = self._forms.rounded(result, len(ids), cache, codec, rows)
            if any(records.lossy for records in found):
                found, result = [], self._frozen.run(inputs(), 0, position, whole)
            if served is not None:
                with self._clock.phase("codec"):
                    compare(as_given(result), as_given(self._frozen.here(served)))
            codec = "native"
        if write:
            with self._clock.phase("cache_write"):
                self._store(
                    cache,
                    ids,
                    result,
                    hashes,
                    found,
                    rows,
                    codec,
                    inputs,
                    position,
                    lone,
                )
        else:  # shows what is fixed: records are read
            self._forms.storable(result, len(ids), cache)
        return as_given(result)

    def _reads(self, cache: ActivationCache | None) -> bool:
        return cache is not None and not cache.given_up and self.uses_cache

    def run_ahead(
        self,
        inputs: Callable[[], Any],
        ids: Tensor,
        cache: ActivationCache | None,
        *,
        position: DrawPosition,
    ) -> None:
        """Let workers compute a batch to come while they have nothing else to do.

        Nothing happens where the plan does not fill bubbles, or a cache is in use.

        Args:
            inputs: Gives the batch's inputs.
            ids: Its sample ids, the very tensor that it will be asked for with.
            cache: As it will be given then.
            position: The same; computed again if it turns out another one.
        """
        if not self.fills or self._reads(cache):
            self.give_up_ahead()
            return
        self._frozen.run_ahead(inputs, ids, position=position)

    def give_up_ahead(self) -> None:
        """Let go of a batch to come: no worker runs layers for it any more."""
        self._frozen.give_up_ahead()

    def _rows(self, inputs: Any, *, keep: bool) -> RaggedRows:
        """Return the lengths of ragged rows; `keep` the padded one for lazy batches."""
        if self._ragged is None:
            raise RuntimeError("lengths of rows that are not ragged; please report")
        rows = self._ragged.rows_of(inputs, tensors_of(inputs))
        if keep:
            self._length = rows.padded
        return rows

    def _hashes(
        self, inputs: Any, rows: RaggedRows | None, cache: ActivationCache
    ) -> Tensor | None:
        """Hash each row with what goes to all of them; None: that cannot be told."""
        fixed = beside_tensors(inputs)
        if fixed is None:
            self._refuse(
                "inputs hold more than tensors and plain values, and whether that is "
                "the same again cannot be told"
            )
            return None
        hashes = self._hashes_of_rows(inputs, rows, cache)
        if fixed:
            text = torch.tensor(hash_bytes(fixed.encode()), dtype=torch.uint64)
            hashes = hashes ^ text.view(torch.int64)
        return hashes

    def _hashes_of_rows(
        self, inputs: Any, rows: RaggedRows | None, cache: ActivationCache
    ) -> Tensor:
        if rows is not None:
            return hash_ragged_rows(rows)
        tensors = tensors_of(inputs)
        shapes = [tensor.shape[1:] for tensor in tensors]
        if self._shapes not in (None, shapes):
            cache.warn_once(
                "shapes",
                "inputs differ in shape between batches, and a sample padded in "
                "another way counts as another one; PipeTransformer(ragged=pt.Ragged("
                "...)) says what is padding",
            )
        self._shapes = shapes
        return hash_rows(*tensors)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        _LOG.warning("frozen prefix is not cached: %s", reason)

    def _store(
        self,
        cache: ActivationCache,
        ids: Tensor,
        result: Any,
        hashes: Tensor,
        found: Sequence[Records],
        ragged: RaggedRows | None,
        codec: Codec,
        inputs: Callable[[], Any],
        position: DrawPosition,
        lone: tuple[Tensor, Any] | None,
    ) -> None:
        tensors = self._forms.storable(result, len(ids), cache)
        if tensors is None:
            self._refuse(
                f"layer {self.boundary - 1} returns more than tensors with one row per "
                "sample, and plain values and tensors that are always the same"
            )
            return
        reason = self._forms.misfit(tensors, ragged)
        if reason is None and ragged is not None:
            reason = self._audits.not_narrowed(inputs, ragged, cache, position)
        if reason is not None:
            self._refuse(f"layer {self.boundary - 1}: {reason}")
            return
        if lone is not None:
            self._audits.try_alone(lone, tensors, ragged, cache, position, self._refuse)
        if self.refusal is not None:
            return
        lengths = ragged.lengths if ragged is not None else None
        tensors = tuple(self._forms.joined(tensors, ragged))
        fresh = torch.ones(len(ids), dtype=torch.bool)
        for records in found:
            if records.boundary == self.boundary:
                fresh[records.rows] = False
        rows = fresh.nonzero().squeeze(1)
        if len(rows) < len(ids):
            ids, hashes = ids[rows], hashes[rows]
            tensors = tuple(t[rows] for t in tensors)
            lengths = lengths[rows] if lengths is not None else None
        cache.store(
            ids,
            tensors,
            boundary=self.boundary,
            fingerprint=self._record_chain(cache)[-1],
            input_hashes=hashes,
            ragged=self._ragged,
            lengths=lengths,
            codec=codec,
            disk=self.uses_disk,
        )

    def _advance(
        self,
        records: Records,
        cache: ActivationCache,
        position: DrawPosition,
        whole: bool,
    ) -> Any:
        if records.boundary == self.boundary:
            return self._frozen.here(self._forms.as_read(records.tensors, cache))
        given = flat(records.tensors)
        return self._frozen.run(given, records.boundary, position, whole)

    def _assemble(
        self,
        inputs: Callable[[], Any],
        found: Sequence[Records],
        rows: int,
        cache: ActivationCache,
        position: DrawPosition,
        whole: bool,
    ) -> list[tuple[Tensor, Any]]:
        """Compute the missing rows and advance the found ones: places and values."""
        missing = torch.ones(rows, dtype=torch.bool)
        parts: list[tuple[Tensor, Any]] = []
        for records in found:
            missing[records.rows] = False
            advanced = self._advance(records, cache, position, whole)
            parts.append((records.rows, advanced))
        absent = missing.nonzero().squeeze(1)
        if len(absent):
            taken = inputs() if len(absent) == rows else slice_rows(inputs(), absent)
            parts.append((absent, self._frozen.run(taken, 0, position, whole)))
        return parts


def _padding(ragged: Ragged | None) -> tuple[object, ...]:
    """Return what of padding records depend on."""
    if ragged is None:
        return ()
    several = (ragged.which,) if ragged.has_several else ()
    return (ragged.dim, ragged.fill, *several)


def _with_padding(keys: Tensor, rows: RaggedRows | None) -> Tensor:
    """Return keys that tell how rows of padding alone were padded."""
    if rows is None or not bool(rows.bare.any()):
        return keys
    text = torch.tensor(hash_bytes(f"{rows.widths}".encode()), dtype=torch.uint64)
    return torch.where(rows.bare, keys ^ text.view(torch.int64), keys)


def _merge(parts: Sequence[tuple[Tensor, Any]], rows: int) -> Any:
    order = torch.cat([where for where, _ in parts])
    place = torch.empty(rows, dtype=torch.int64)
    place[order] = torch.arange(rows)
    return slice_rows(join_rows([value for _, value in parts]), place)
