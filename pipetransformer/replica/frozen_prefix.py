"""The frozen prefix: cache look-up, and the forward of what the cache lacks.

Frozen layers run once per sample (`frozen_layers`), and what they return is kept. What
is read of records is on the first device. A record found at an earlier boundary is
advanced: only the layers behind that boundary run. Where nothing is cached, a plan may
have the workers run them for the next batch whenever they wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import (
    TOLERANCES,
    ActivationCache,
    Codec,
    Ragged,
    RaggedRows,
    Records,
    cacheable,
    fingerprint_chain,
    hash_ragged_rows,
    hash_rows,
    round_trip,
    unfit,
    valid_part,
)
from pipetransformer.core.devices import HOST, to_device
from pipetransformer.data.structures import (
    fit_together,
    flat_tensors,
    join_rows,
    rows_of,
    slice_rows,
    tensors_of,
)
from pipetransformer.pipe import Workers, draw_scope
from pipetransformer.replica.differences import difference, other_kind
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.drift import Drift
from pipetransformer.replica.faulty_layer import faulty_layer
from pipetransformer.replica.frozen_layers import FrozenLayers
from pipetransformer.replica.handed_on import (
    Form,
    HandedOn,
    as_given,
    beside_tensors,
    of_one_form,
)
from pipetransformer.replica.in_place import run_in_place
from pipetransformer.report.clock import Clock
from pipetransformer.skip import SkipTracker, use_skip_tracker

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
        self._drift = Drift(self._layers)
        self._clock = clock
        self._seed = seed
        self._ragged = ragged
        self._debug = debug
        self._own_bits = own_bits
        self._admitted = admitted
        self._disk_admitted = disk_admitted
        self._device_bytes = device_bytes
        self._sharers = sharers
        self._copied_from: ActivationCache | None = None
        self._narrowed: set[int] = set()  # of a row's lengths, those tried unpadded
        self._was_alone = False  # a row has been computed without its batch
        self._trying = threading.Lock()
        self._length: int | None = None  # padded, of the last training inputs
        self._shapes: list[torch.Size] | None = None  # of the last inputs' rows
        # Of the records here; workers look them up for several micro-batches at once.
        self._forms: weakref.WeakKeyDictionary[ActivationCache, tuple[Form, str]] = (
            weakref.WeakKeyDictionary()  # sets may be of other shapes
        )
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
        """Return the same of records: of rows alone, if what is fixed is known."""
        chain, known = self._frozen.fingerprints(), self._forms.get(cache)
        if known is None:
            return chain
        return [*chain[:-1], hash_bytes(f"{chain[-1]} {known[1]}".encode())]

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
            hashes = keys
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
            found = [self._parted(records, rows) for records in found]
        if self._debug:
            for records in found:
                self._check(inputs(), records, ids, cache, position, codec, whole=whole)
        elif (
            found
            and cache.audit_due()
            and not self._passes_audit(inputs(), found[0], cache, position, codec)
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
        lone = self._lone_row(inputs, found, len(ids), cache) if write else None
        parts = self._assemble(inputs, found, len(ids), cache, position, whole)
        values = [value for _, value in parts]
        if not fit_together(values) or not of_one_form(values):
            # Padded to the longest row of other batches: nothing found is of use.
            found = []
            parts = self._assemble(inputs, [], len(ids), cache, position, whole)
        result = parts[0][1] if len(parts) == 1 else _merge(parts, len(ids))
        if compare is not None:
            served = self._rounded(result, len(ids), cache, codec, rows)
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
        else:
            self._storable(
                result, len(ids), cache
            )  # shows what is fixed: records are read
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

    def _rounded(
        self,
        value: Any,
        rows: int,
        cache: ActivationCache,
        codec: Codec,
        ragged: RaggedRows | None,
    ) -> Any:
        """Return what a codec makes of activations; None: they cannot be stored."""
        tensors = self._storable(value, rows, cache)
        if tensors is None or self._misfit(tensors, ragged) is not None:
            return None
        lengths = ragged.lengths if ragged is not None else None
        kept = self._joined(tensors, ragged)
        read = round_trip(kept, codec, ragged=self._ragged, lengths=lengths)
        if self._ragged is not None and ragged is not None:
            read = list(self._ragged.parted(read, ragged))
        return self._as_read(read, cache)

    def _storable(
        self, value: Any, rows: int, cache: ActivationCache
    ) -> tuple[Tensor, ...] | None:
        """Return what a record holds; None: it could not be made whole again."""
        if isinstance(value, HandedOn):
            form, text = value.form, value.form.text()
            # A batch of rows that were padded to another length may have others.
            varies = self._ragged is not None and not self._ragged.fixed
            if text is None or (varies and form.has_numbers()):
                return None
            if text != self._forms.setdefault(cache, (form, text))[1]:
                return None
            value = value.tensors
        elif cache in self._forms:
            return None
        return flat_tensors(value, rows)

    def _as_read(self, tensors: Sequence[Tensor], cache: ActivationCache) -> Any:
        """Return the value at the boundary that the tensors of a record stand for."""
        known = self._forms.get(cache)
        if known is not None:
            return HandedOn(tuple(tensors), known[0])
        return _flat(tensors)

    def _misfit(
        self, tensors: Sequence[Tensor], ragged: RaggedRows | None
    ) -> str | None:
        reason = unfit(tensors)
        if reason is not None or self._ragged is None or ragged is None:
            return reason
        return self._ragged.misfit(tensors, ragged.widths)

    def _joined(
        self, tensors: Sequence[Tensor], ragged: RaggedRows | None
    ) -> Sequence[Tensor]:
        """Return tensors at the boundary as records hold them."""
        if self._ragged is None or ragged is None:
            return tensors
        return self._ragged.joined(tensors, ragged)

    def _parted(self, found: Records, ragged: RaggedRows | None) -> Records:
        """Return records of rows with several lengths, each tensor of its own."""
        if self._ragged is None or ragged is None or not self._ragged.has_several:
            return found
        tensors = tuple(self._ragged.parted(found.tensors, ragged))
        own = ragged.own[found.rows]
        return dataclasses.replace(found, tensors=tensors, lengths=own)

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

    def _passes_audit(
        self,
        inputs: Any,
        found: Records,
        cache: ActivationCache,
        position: DrawPosition,
        codec: Codec,
    ) -> bool:
        """Compute a found row again; empty and leave the cache if it differs."""
        with self._clock.phase("audit"), self.awake():
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

    def _check(
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
        if boundary < self.boundary:
            return tensors_of(value)
        return self._with_rows(value, cache)

    def _with_rows(self, value: Any, cache: ActivationCache) -> list[Tensor]:
        """Return what a record holds of a value at the boundary; empty: not this."""
        known = self._forms.get(cache)
        if known is None:
            return tensors_of(value)
        form = known[0]
        return list(form.rows_of(value)) if form.fits(value) else []

    def _lone_row(
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
        if self._debug or self._was_alone or not cache.audits or rows < 2:
            return None
        exact = torch.ones(rows, dtype=torch.bool)
        for records in found:
            if records.lossy:
                exact[records.rows] = False
        if not bool(exact.any()):
            return None
        last = exact.nonzero()[-1]
        return last, slice_rows(inputs(), last)

    def _try_alone(
        self,
        lone: tuple[Tensor, Any],
        tensors: Sequence[Tensor],
        rows: RaggedRows | None,
        cache: ActivationCache,
        position: DrawPosition,
    ) -> None:
        """Run a row without its batch, once; cache nothing if it differs from itself.

        Before the first record is stored: layers that mix the rows of a batch, or draw
        random numbers in eval mode, look like all others. Workers that come meanwhile
        wait for what is found.
        """
        place, row = lone
        lengths = rows.own[place[0]].tolist() if rows is not None else None
        with self._clock.phase("audit"), self._trying:
            if self._was_alone:
                return
            try:
                with self.awake():
                    alone = self._alone(row, self.boundary, cache, position)
            except torch.OutOfMemoryError:
                return  # later, perhaps
            except Exception as error:  # whatever layers raise for one row
                apart: str | None = f"{type(error).__name__}: {error}"
            else:
                here = [tensor[place] for tensor in tensors]
                apart = self._apart_from(alone, here, lengths)
            if apart is not None:
                self._refuse(
                    "a sample computed without its batch differs from itself there "
                    f"({apart}): layers mix samples or padding, or draw random "
                    "numbers; CacheConfig(debug=True) names the layer"
                )
            self._was_alone = True

    def _not_narrowed(
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
            shorter = (own < width) & (rows.own > 0).all(1)
            if number in self._narrowed or not bool(shorter.any()):
                continue
            self._narrowed.add(number)
            longest = torch.where(shorter, own, 0).argmax().reshape(1)
            row, lengths = slice_rows(inputs(), longest), rows.own[longest[0]].tolist()
            with self._clock.phase("audit"), self.awake(), self._scope(position):
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

    def _recorded(self, inputs: Any, cache: ActivationCache) -> list[Tensor]:
        """Run the layers; return what a record would hold, empty where it is none."""
        value = run_in_place(self._layers, self._frozen.here(inputs))
        return self._with_rows(value, cache)

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
            self._layers, self.boundary, context=self._frozen.context()
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
        rows = None if self._ragged is None else self._rows(inputs, keep=False)
        lengths = None if rows is None else rows.own[row].tolist()
        found = faulty_layer(layers, here, row, scope=scope, differ=differ)
        return found or (
            "no layer gives other values when it runs again or alone: its code has "
            "changed since the record was made, or its values depend on more than "
            "its inputs, weights and settings"
        )

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
        tensors = self._storable(result, len(ids), cache)
        if tensors is None:
            self._refuse(
                f"layer {self.boundary - 1} returns more than tensors with one row per "
                "sample, and plain values and tensors that are always the same"
            )
            return
        reason = self._misfit(tensors, ragged)
        if reason is None and ragged is not None:
            reason = self._not_narrowed(inputs, ragged, cache, position)
        if reason is not None:
            self._refuse(f"layer {self.boundary - 1}: {reason}")
            return
        if lone is not None:
            self._try_alone(lone, tensors, ragged, cache, position)
        if self.refusal is not None:
            return
        lengths = ragged.lengths if ragged is not None else None
        tensors = tuple(self._joined(tensors, ragged))
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
            return self._frozen.here(self._as_read(records.tensors, cache))
        given = _flat(records.tensors)
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


def _flat(tensors: Sequence[Tensor]) -> Any:
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _merge(parts: Sequence[tuple[Tensor, Any]], rows: int) -> Any:
    order = torch.cat([where for where, _ in parts])
    place = torch.empty(rows, dtype=torch.int64)
    place[order] = torch.arange(rows)
    return slice_rows(join_rows([value for _, value in parts]), place)
