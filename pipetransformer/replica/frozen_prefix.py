"""The frozen prefix: cache look-up, and the forward of what the cache lacks.

Frozen layers run once per sample under ``no_grad`` and in eval mode, in micro-batches
over all devices of the pipeline: replicated, those but the first have copies of them,
or pipelined, each has a chunk of them that all micro-batches pass. What the layers
return is on the first, and so is what is read of records. A record found at an earlier
boundary is advanced: only the layers behind that boundary run. Layers that draw random
numbers even so draw keyed ones, as those of the pipeline do.

Once a pass has found all of its records, the layers leave the devices for the host:
they come back when something is missing.

Where a plan fills gaps, and nothing is cached, the workers run the layers for the next
batch whenever they wait, see `filled`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
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
    valid_part,
    values_context,
)
from pipetransformer.core.devices import HOST, to_device
from pipetransformer.core.fixed_values import tensors_have_rows
from pipetransformer.data.structures import (
    call_layers,
    fit_together,
    flat_tensors,
    join_rows,
    rows_of,
    slice_rows,
    tensors_of,
)
from pipetransformer.pipe import Workers, draw_scope, keyed_draws_work
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.faulty_layer import faulty_layer
from pipetransformer.replica.filled import Ahead, FilledForward, state_of
from pipetransformer.replica.handed_on import (
    Form,
    HandedOn,
    as_given,
    handed_on,
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
        device_bytes: int = 0,
        sharers: int = 1,
    ) -> None:
        self.boundary = boundary
        self._layers = list(layers)[:boundary]
        self._devices = list(devices)
        self._places = list(places or [self._devices[0]] * boundary)
        self._passed_on = len(set(self._places)) > 1
        self._num_microbatches = num_microbatches
        # Draws that are not keyed are those of the process: one thread's at a time.
        self.fills = fills and workers.num_workers > 1 and keyed_draws_work()
        self._ahead: Ahead | None = None
        self._on: dict[torch.device, list[nn.Module]] = {}
        self._copied: list[int] | None = None  # fingerprints of what was copied
        self._workers = workers
        self._clock = clock
        self._seed = seed
        self._ragged = ragged
        self._debug = debug
        self._own_bits = own_bits
        self._admitted = admitted
        self._disk_admitted = disk_admitted
        self._place = place
        self._device_bytes = device_bytes
        self._sharers = sharers
        self._copied_from: ActivationCache | None = None
        self._rests = False  # on the host, as nothing needs the layers
        self._has_rested = False
        self._needed = True  # in training, since the pass began
        self._length: int | None = None  # padded, of the last inputs
        self._shapes: list[torch.Size] | None = None  # of the last inputs' rows
        self._have_rows: dict[tuple[int, int], list[bool]] = {}  # by boundary, tensors
        self._form: tuple[Form, str] | None = None  # of the cache's records here
        self._forms: weakref.WeakKeyDictionary[ActivationCache, tuple[Form, str]] = (
            weakref.WeakKeyDictionary()  # sets may be of other shapes
        )
        self._chains: dict[object, list[int]] = {}  # by what was in force, see `_chain`
        self.refusal = cacheable(self._layers)
        if self.refusal is not None:
            _LOG.warning("frozen prefix is not cached: %s", self.refusal)
        self.refresh()

    @property
    def uses_cache(self) -> bool:
        """Whether activations may be cached, and are worth it."""
        return self.refusal is None and self._admitted()

    @property
    def uses_disk(self) -> bool:
        """Whether they are on disk, too, where there is one."""
        return self.uses_cache and self._disk_admitted()

    def begin_pass(self) -> None:
        """Note that a pass over the training set begins.

        The layers leave the devices if the pass before has needed none.
        """
        if not self._needed:
            self._rest()
        self._needed = False
        self.give_up_ahead()  # of a pass that was left
        self.refresh()

    def refresh(self) -> None:
        """Fingerprint the frozen weights again; call it before each pass.

        Records of weights that something has changed since then become misses.
        """
        self._chains = {}
        if self._copied != self._chain() and not self._rests:
            self._forms.clear()
            self._copy()

    def _copy(self) -> None:
        first, *others = dict.fromkeys(self._devices)
        self._on = {first: self._layers}
        if not self._passed_on:
            self._on |= {device: _copied(self._layers, device) for device in others}
        self._copied = self._chain()

    def _rest(self) -> None:
        if self._rests or self._devices[0] == HOST:
            return
        self._on, self._copied = {}, None
        self._place([HOST] * self.boundary)
        self._rests = True
        if not self._has_rested:
            self._has_rested = True
            _LOG.info("frozen layers rest on the host: all that they give is cached")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the layers where they compute."""
        rested = self._rests
        self._wake()
        try:
            yield
        finally:
            if rested:
                self._rest()

    def _wake(self) -> None:
        if self._rests:
            self._place(self._places)
            self._rests = False
            self._copy()

    def _use_device(self, cache: ActivationCache) -> None:
        if self._device_bytes and self._copied_from is not cache:
            self._copied_from = cache
            cache.use_device(
                self._devices[0], self._device_bytes, sharers=self._sharers
            )

    def retire(self) -> None:
        """Give back what is on the device for this prefix alone.

        No worker runs the layers any more, so they may be trained again.
        """
        self.give_up_ahead()
        if self._copied_from is not None:
            self._copied_from.use_device(self._devices[0], 0)
            self._copied_from = None

    def spread(self, function: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Call a function with each item, on the workers where these compute."""
        if self._devices[0] == HOST:
            return self._workers.map(function, items)
        # Calls return at once; worker threads have other current streams.
        return [function(item) for item in items]

    def _here(self, value: Any) -> Any:
        return to_device(value, self._devices[0])

    def _context(self) -> tuple[object, ...]:
        """Return what values depend on besides the layers.

        Padding is part of it: records of another spec than this one are misses.
        """
        context = values_context()
        if self._ragged is None:
            return context
        return (*context, self._ragged.dim, self._ragged.fill)

    def _chain(self) -> list[int]:
        """Return the fingerprints of what the layers compute under this autocast."""
        context, known = self._context(), self._chains
        if context not in known:
            known[context] = fingerprint_chain(
                self._layers, self.boundary, context=context
            )
        return known[context]

    def _record_chain(self) -> list[int]:
        """Return the same of records: of rows alone, if what is fixed is known."""
        chain = self._chain()
        if self._form is None:
            return chain
        return [*chain[:-1], hash_bytes(f"{chain[-1]} {self._form[1]}".encode())]

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
                return as_given(self._run_filled(inputs, ids, position))
            return as_given(self._run(inputs(), 0, position, whole))
        if not whole:
            self._use_device(cache)
        self._form = self._forms.get(cache)
        ids = cache.record_ids(ids, view)
        with self._clock.phase("cache_read"):
            rows = None
            if self._ragged is not None and not (lazy and self._length):
                rows = self._rows(inputs())
            hashes = keys
            if hashes is None:
                hashes = self._hashes(inputs(), rows, cache)
            found = cache.fetch(
                ids,
                chain=self._record_chain(),
                input_hashes=hashes,
                ragged=self._ragged,
                length=self._length,
                codec=codec,
                disk=self.uses_disk,
                device=self._devices[0],
            )
        if self._debug:
            for records in found:
                self._check(inputs(), records, ids, cache, position, codec, whole=whole)
        elif (
            found
            and cache.audit_due()
            and not self._passes_audit(inputs(), found[0], cache, position, codec)
        ):
            return as_given(self._run(inputs(), 0, position, whole))
        complete = len(found) == 1 and len(found[0].rows) == len(ids)
        if whole and not complete:
            found = []
        if complete and found[0].boundary == self.boundary and compare is None:
            return as_given(self._advance(found[0], position, whole))
        if self._ragged is not None and rows is None:
            rows = self._rows(inputs())
        parts = self._assemble(inputs, found, len(ids), position, whole)
        values = [value for _, value in parts]
        if not fit_together(values) or not of_one_form(values):
            # Padded to the longest row of other batches: nothing found is of use.
            found, parts = [], self._assemble(inputs, [], len(ids), position, whole)
        result = parts[0][1] if len(parts) == 1 else _merge(parts, len(ids))
        if compare is not None:
            served = self._rounded(result, len(ids), cache, codec, rows)
            if any(records.lossy for records in found):
                found, result = [], self._run(inputs(), 0, position, whole)
            if served is not None:
                with self._clock.phase("codec"):
                    compare(as_given(result), as_given(self._here(served)))
            codec = "native"
        if write:
            with self._clock.phase("cache_write"):
                self._store(cache, ids, result, hashes, found, rows, codec)
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

        Nothing happens where the plan does not fill gaps, or a cache is in use.

        Args:
            inputs: Gives the batch's inputs.
            ids: Its sample ids, the very tensor that it will be asked for with.
            cache: As it will be given then.
            position: The same; computed again if it turns out another one.
        """
        if not self.fills or self._reads(cache):
            self.give_up_ahead()
        elif self._ahead is None or not self._ahead.is_of(ids, position):
            self.give_up_ahead()
            try:
                given = inputs()
            except Exception:  # it is loaded, and raises, again in its own step
                return
            self._ahead = self._begin(given, ids, position)

    def give_up_ahead(self) -> None:
        """Let go of a batch to come: no worker runs layers for it any more."""
        held, self._ahead = self._ahead, None
        if held is not None:
            held.forward.cancel()

    def _begin(self, inputs: Any, ids: Tensor, position: DrawPosition) -> Ahead:
        state = self._state(inputs)
        cut = self._cut(self._here(inputs), position, self._num_microbatches)
        forward = FilledForward(
            self._workers,
            self._layers,
            [piece for _, piece in cut],
            seed=self._seed,
            position=position,
            first=cut[0][0],
        )
        return Ahead(ids, position, inputs, state, forward)

    def _state(self, inputs: Any) -> object:
        """Return what tells whether values were computed from what is there now."""
        held = (t for x in self._layers for t in (*x.parameters(), *x.buffers()))
        return state_of(inputs, held, self._context())

    def _run_filled(
        self, inputs: Callable[[], Any], ids: Tensor, position: DrawPosition
    ) -> Any:
        """Return what is ready of a batch, or will be soon."""
        given = inputs()
        held, self._ahead = self._ahead, None
        known = held is not None and held.is_of(ids, position)
        if held is None or not known or held.state != self._state(given):
            if held is not None:
                held.forward.cancel()
            held = self._begin(given, ids, position)
        with self._clock.phase("prefix"), torch.no_grad():
            outputs = held.forward.outputs()
            cut = self._cut(given, position, self._num_microbatches)
            forward = self._forward(position, 0)
            return self._joined(outputs, given, cut, forward, self.boundary)

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
        return self._as_read(
            round_trip(tensors, codec, ragged=self._ragged, lengths=lengths)
        )

    def _storable(
        self, value: Any, rows: int, cache: ActivationCache
    ) -> tuple[Tensor, ...] | None:
        """Return what a record holds; None: it could not be made whole again."""
        if isinstance(value, HandedOn):
            form, text = value.form, value.form.text()
            # A batch of rows that were padded to another length may have others.
            if text is None or (self._ragged is not None and form.has_numbers()):
                return None
            self._form = self._forms.setdefault(cache, (form, text))
            if text != self._form[1]:
                return None
            value = value.tensors
        elif self._form is not None:
            return None
        return flat_tensors(value, rows)

    def _as_read(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value at the boundary that the tensors of a record stand for."""
        if self._form is not None:
            return HandedOn(tuple(tensors), self._form[0])
        return _flat(tensors)

    def _misfit(
        self, tensors: Sequence[Tensor], ragged: RaggedRows | None
    ) -> str | None:
        if self._ragged is None or ragged is None:
            return None
        return self._ragged.misfit(tensors, ragged.padded)

    def _rows(self, inputs: Any) -> RaggedRows | None:
        if self._ragged is None:
            return None
        rows = self._ragged.rows_of(inputs, tensors_of(inputs))
        self._length = rows.padded
        return rows

    def _hashes(
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
            again = self._alone(inputs, found, position)
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
            again = self._run(batch, 0, position, whole, found.boundary)
            fresh = tensors_of(again)
            # Kernels of an accelerator may give other bits each time.
            exact = whole and self._own_bits and not found.lossy
            bits = exact and all(t.is_cpu for t in fresh)
            for number, row in enumerate(found.rows.tolist()):
                here = [tensor[row : row + 1] for tensor in fresh]
                reason = self._apart(here, found, number, codec, bits=bits)
                if reason is None and number == 0:
                    alone = self._alone(inputs, found, position)
                    reason = self._apart(alone, found, 0, codec)
                if reason is not None:
                    raise ValueError(
                        f"CacheConfig.debug: expected {cache.name_of(int(ids[row]))} "
                        f"computed again at boundary {found.boundary} as it is in the "
                        f"cache, got {reason}; {self._cause(inputs, row, position)}"
                    )

    def _alone(
        self, inputs: Any, found: Records, position: DrawPosition
    ) -> list[Tensor]:
        """Compute the first found row again, up to the boundary of its record."""
        layers = self._layers[: found.boundary]
        row = self._here(slice_rows(inputs, found.rows[:1]))
        with self._scope(position):
            value = self._here(run_in_place(layers, row))
        if self._form is None or found.boundary < self.boundary:
            return tensors_of(value)
        form = self._form[0]
        return list(form.rows_of(value)) if form.fits(value) else []

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
        length = int(found.lengths[number]) if found.lengths is not None else None
        cached = [tensor[number : number + 1] for tensor in found.tensors]
        return _other_kind(fresh, cached) or _difference(
            valid_part(fresh, self._ragged, length),
            valid_part(cached, self._ragged, length),
            bits=bits,
            rounded=TOLERANCES[codec] if found.lossy else 0.0,
        )

    def _cause(self, inputs: Any, row: int, position: DrawPosition) -> str:
        """Say why a row computed again differs from its record, as far as it shows."""
        self._wake()
        # The run ends. No device may have room for chunks of all.
        place = HOST if self._passed_on else self._devices[0]
        self._place([place] * self.boundary)
        now = fingerprint_chain(self._layers, self.boundary, context=self._context())
        for layer, (old, new) in enumerate(zip(self._chain(), now, strict=True), -1):
            if old != new:
                return f"layer {layer} was changed after the pass had begun"

        def scope(number: int) -> contextlib.AbstractContextManager[None]:
            step = position.step + number
            return self._scope(dataclasses.replace(position, step=step))

        layers, here = self._layers, to_device(inputs, place)
        found = faulty_layer(layers, here, row, scope=scope, differ=_difference)
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
    ) -> None:
        tensors = self._storable(result, len(ids), cache)
        if tensors is None:
            self._refuse(
                f"layer {self.boundary - 1} returns more than tensors with one row per "
                "sample, and plain values and tensors that are always the same"
            )
            return
        reason = self._misfit(tensors, ragged)
        if reason is not None:
            self._refuse(f"layer {self.boundary - 1}: {reason}")
            return
        lengths = ragged.lengths if ragged is not None else None
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
            fingerprint=self._record_chain()[-1],
            input_hashes=hashes,
            ragged=self._ragged,
            lengths=lengths,
            codec=codec,
            disk=self.uses_disk,
        )

    def _advance(self, records: Records, position: DrawPosition, whole: bool) -> Any:
        if records.boundary == self.boundary:
            return self._here(self._as_read(records.tensors))
        return self._run(_flat(records.tensors), records.boundary, position, whole)

    def _assemble(
        self,
        inputs: Callable[[], Any],
        found: Sequence[Records],
        rows: int,
        position: DrawPosition,
        whole: bool,
    ) -> list[tuple[Tensor, Any]]:
        """Compute the missing rows and advance the found ones: places and values."""
        missing = torch.ones(rows, dtype=torch.bool)
        parts: list[tuple[Tensor, Any]] = []
        for records in found:
            missing[records.rows] = False
            parts.append((records.rows, self._advance(records, position, whole)))
        absent = missing.nonzero().squeeze(1)
        if len(absent):
            taken = inputs() if len(absent) == rows else slice_rows(inputs(), absent)
            parts.append((absent, self._run(taken, 0, position, whole)))
        return parts

    def _run(
        self,
        inputs: Any,
        start: int,
        position: DrawPosition,
        whole: bool,
        end: int | None = None,
    ) -> Any:
        if not self._layers[start:end]:
            return self._here(inputs)
        self._needed = self._needed or not whole  # else it is an evaluation
        self._wake()
        most = self._workers.num_workers
        if self._passed_on or self.fills:
            most = self._num_microbatches
        cut = self._cut(inputs, position, 1 if whole else most)
        forward = self._forward(position, start, end)
        with self._clock.phase("prefix"), torch.no_grad():
            alone = len(cut) == 1
            outputs = [forward(cut[0])] if alone else self.spread(forward, cut)
            last = self.boundary if end is None else end
            return self._joined(outputs, inputs, cut, forward, last)

    @staticmethod
    def _cut(inputs: Any, position: DrawPosition, most: int) -> list[tuple[int, Any]]:
        """Cut a batch into at most so many micro-batches, each with its number."""
        rows = rows_of(inputs)
        pieces = max(1, min(most, rows))
        first = position.first_microbatch * most  # replicas' pieces never meet
        if pieces == 1:
            return [(first, inputs)]
        ends = [rows * i // pieces for i in range(pieces + 1)]
        return [
            (first + i, slice_rows(inputs, slice(a, b)))
            for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))
        ]

    def _forward(
        self,
        position: DrawPosition,
        start: int,
        end: int | None = None,
    ) -> Callable[[tuple[int, Any]], Any]:
        """Return what runs a numbered micro-batch through the layers."""

        def forward(numbered: tuple[int, Any]) -> Any:
            number, piece = numbered
            draws = draw_scope(
                self._seed, position.step, microbatch=number, layer=start
            )
            if self._passed_on:
                with draws:
                    there = to_device(piece, self._places[start])
                    chunk = self._layers[start:end]
                    return self._here(run_in_place(chunk, there, first=start == 0))
            device = self._devices[number % len(self._devices)]
            layers = self._on[device][start:end]
            with use_skip_tracker(SkipTracker()), draws:
                taken = to_device(piece, device)
                return self._here(call_layers(layers, taken, first=start == 0))

        return forward

    def _joined(
        self,
        outputs: list[Any],
        inputs: Any,
        cut: Sequence[tuple[int, Any]],
        forward: Callable[[tuple[int, Any]], Any],
        end: int,
    ) -> Any:
        """Return the outputs of a batch's micro-batches as one.

        Args:
            outputs: What layer ``end - 1`` has returned for each.
            inputs: Of the batch.
            cut: The micro-batches, with their numbers.
            forward: Runs one of them again.
            end: The layer behind.
        """
        if not isinstance(outputs[0], Tensor):
            key = end, len(tensors_of(outputs[0]))
            if key not in self._have_rows:
                number, piece = cut[0]
                rows = rows_of(piece)
                most = 2 * rows  # fewer may be too few for a layer
                taken = slice_rows(inputs, torch.arange(most) % rows)
                self._have_rows[key] = tensors_have_rows(
                    f"{end - 1} ({type(self._layers[end - 1]).__name__})",
                    (outputs[0], forward((number, taken))),
                    (rows, most),
                )
            outputs = handed_on(outputs, self._have_rows[key])
        return outputs[0] if len(outputs) == 1 else join_rows(outputs)


def _copied(layers: Sequence[nn.Module], device: torch.device) -> list[nn.Module]:
    """Return copies of layers on another device; what they share, copies share."""
    memo: dict[int, Any] = {}
    for layer in layers:
        for parameter in layer.parameters():
            moved = parameter.detach().to(device)
            memo[id(parameter)] = nn.Parameter(moved, requires_grad=False)
        memo.update((id(buffer), buffer.to(device)) for buffer in layer.buffers())
    return [copy.deepcopy(layer, memo) for layer in layers]


# Relative, of what another number of rows in a batch makes of rounding.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_COARSE = 1e-1


def _other_kind(fresh: Sequence[Tensor], cached: Sequence[Tensor]) -> str | None:
    """Say how the kinds of tensors differ, or None."""
    if cached and not fresh:
        return "another structure or other fixed values"
    kinds = [
        ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        for tensors in (fresh, cached)
    ]
    return None if kinds[0] == kinds[1] else f"{kinds[0]}; recorded {kinds[1]}"


def _difference(
    fresh: Sequence[Tensor],
    cached: Sequence[Tensor],
    *,
    bits: bool = False,
    rounded: float = 0.0,
) -> str | None:
    """Say which tensor is apart beyond rounding, and how far, or None.

    Args:
        fresh: Computed again.
        cached: From a record.
        bits: Rounding counts, too.
        rounded: How far the record may be off because of its codec, relative.
    """
    if (reason := _other_kind(fresh, cached)) is not None:
        return reason
    for number, (one, other) in enumerate(zip(fresh, cached, strict=True)):
        one, other = one.detach().cpu(), other.cpu()
        where = f"tensor {number}: "
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"{where}{int((one != other).sum())} of {one.numel()} values"
            continue
        allowed = 0.0 if bits else _TOLERANCES.get(one.dtype, _COARSE) + rounded
        one, other = one.double(), other.double()
        # Equal infinities, as masks hold them, have no difference to speak of.
        differs = (one != other) & ~(one.isnan() & other.isnan())
        apart = (one - other)[differs].norm()
        size = one[one.isfinite()].norm()
        if not apart <= size * allowed + (0.0 if bits else 1e-30):
            return (
                f"{where}norm of the difference {apart:.3g}, of the values {size:.3g}"
            )
    return None


def _flat(tensors: Sequence[Tensor]) -> Any:
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _merge(parts: Sequence[tuple[Tensor, Any]], rows: int) -> Any:
    order = torch.cat([where for where, _ in parts])
    place = torch.empty(rows, dtype=torch.int64)
    place[order] = torch.arange(rows)
    return slice_rows(join_rows([value for _, value in parts]), place)
