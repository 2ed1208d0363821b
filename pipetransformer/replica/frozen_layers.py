"""Frozen layers and where they run: one forward of theirs for many rows.

They run once per sample under ``no_grad`` and in eval mode, in micro-batches over all
devices of the pipeline: replicated, those but the first have copies of them, or
pipelined, each has a chunk of them that all micro-batches pass. What the layers return
is on the first. Layers that draw random numbers even so draw keyed ones, as those of
the pipeline do.

Where a plan fills bubbles, the workers run them for the next batch whenever they wait,
see `filled`. Where nothing has needed them for a pass, they leave the devices for the
host, and come back when something does.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipetransformer.autocache import fingerprint_chain, values_context
from pipetransformer.core.devices import HOST
from pipetransformer.core.fixed_values import tensors_have_rows
from pipetransformer.data.structures import (
    call_layers,
    fit_together,
    join_rows,
    rows_of,
    slice_rows,
    tensors_of,
)
from pipetransformer.device import bring
from pipetransformer.pipe import Workers, draw_scope, keyed_draws_work
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.filled import (
    Ahead,
    FilledForward,
    in_mode_of_their_own,
    state_of,
    version_of,
)
from pipetransformer.replica.handed_on import handed_on
from pipetransformer.replica.in_place import run_in_place
from pipetransformer.report.clock import Clock
from pipetransformer.skip import SkipTracker, use_skip_tracker

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")


class FrozenLayers:
    """The frozen layers of a plan.

    Args:
        layers: All of them, in eval mode. No skip goes past them.
        workers: The pipeline's workers.
        clock: Is told what goes into computing.
        devices: Of the workers, in their order.
        places: The device of each layer. On several of them: micro-batches pass these.
            None: all are on the first.
        num_microbatches: Micro-batches that pass them; with `fills` all of them.
        fills: Workers run the layers for a batch to come while they wait, see
            `run_ahead`. Of a host's slots alone, and with several of them.
        seed: Seed of the random draws.
        place: Moves the layers to devices, one each, and nothing else.
        hold_still: Puts the layers back into eval mode if something has switched them
            to training, as the user's ``model.train()`` does.
        padding: How rows of different lengths are padded, as far as values depend on
            it.

    Attributes:
        fills: Whether a batch to come may be run ahead.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        workers: Workers,
        clock: Clock,
        *,
        devices: Sequence[torch.device],
        places: Sequence[torch.device] | None,
        num_microbatches: int,
        fills: bool,
        seed: int,
        place: Callable[[Sequence[torch.device]], None],
        hold_still: Callable[[], None] = lambda: None,
        padding: tuple[object, ...] = (),
    ) -> None:
        self._layers = list(layers)
        self._workers = workers
        self._clock = clock
        self._devices = list(devices)
        self._places = list(places or [self._devices[0]] * len(self._layers))
        self._passed_on = len(set(self._places)) > 1
        self._num_microbatches = num_microbatches
        # Draws that are not keyed are those of the process: one thread's at a time.
        self.fills = fills and workers.num_workers > 1 and keyed_draws_work()
        self._seed = seed
        self._place = place
        self._hold_still = hold_still
        self._padding = padding
        self._chains: dict[object, list[int]] = {}  # by context
        self._on: dict[torch.device, list[nn.Module]] = {}
        self._to_fill = self._layers  # what runs ahead; with `fills` copies
        self._copied: list[int] | None = None  # fingerprints of what was copied
        self._ahead: Ahead | None = None
        self._rests = False  # on the host, as nothing needs the layers
        self._has_rested = False
        self._needed = True  # in training, since the pass began
        self._have_rows: dict[tuple[int, int], list[bool]] = {}  # by end, tensors
        self._in_one = False  # micro-batches do not give what can be joined

    @property
    def device(self) -> torch.device:
        """Where inputs are taken from and outputs are."""
        return self._devices[0]

    # -- where they are --------------------------------------------------------

    def begin_pass(self) -> None:
        """Let them leave the devices if the pass before has needed none of them."""
        if not self._needed:
            self._rest()
        self._needed = False
        self.give_up_ahead()  # of a pass that was left

    def refresh(self) -> bool:
        """Fingerprint them again; make the copies anew if they have changed.

        Returns:
            Whether they had.
        """
        self._chains = {}
        if self._copied == self.fingerprints() or self._rests:
            return False
        self._copy()
        return True

    def context(self) -> tuple[object, ...]:
        """Return what values depend on besides layers and inputs.

        Padding is part of it: records of another spec than this one are misses.
        """
        return (*values_context(), *self._padding)

    def fingerprints(self) -> list[int]:
        """Return the fingerprints of what they compute in the context at hand."""
        context, known = self.context(), self._chains
        if context not in known:
            known[context] = fingerprint_chain(
                self._layers, len(self._layers), context=context
            )
        return known[context]

    def _copy(self) -> None:
        first, *others = dict.fromkeys(self._devices)
        self._on = {first: self._layers}
        if not self._passed_on:
            self._on |= {device: _copied(self._layers, device) for device in others}
        if self.fills:
            # What runs ahead runs while the script does, whose ``model.train()`` would
            # switch on the dropout of layers under way.
            self._hold_still()
            self._to_fill = in_mode_of_their_own(self._layers)
        self._copied = self.fingerprints()

    def _rest(self) -> None:
        if self._rests or self._devices[0] == HOST:
            return
        self._on, self._copied = {}, None
        self._place([HOST] * len(self._layers))
        self._rests = True
        if not self._has_rested:
            self._has_rested = True
            _LOG.info("frozen layers rest on the host: all that they give is cached")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the layers where they compute."""
        rested = self._rests
        self.wake()
        try:
            yield
        finally:
            if rested:
                self._rest()

    def wake(self) -> None:
        """Bring them to where they compute, in eval mode."""
        self._hold_still()
        if self._rests:
            self._place(self._places)
            self._rests = False
            self._copy()

    def gather(self) -> torch.device:
        """Bring all of them to one device that has room, for good; return it."""
        self.wake()
        # No device may have room for chunks of all.
        place = HOST if self._passed_on else self.device
        self._place([place] * len(self._layers))
        return place

    # -- running them ----------------------------------------------------------

    def spread(self, function: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Call a function with each item, on the workers where these compute."""
        if self._devices[0] == HOST:
            return self._workers.map(function, items)
        # Calls return at once; worker threads have other current streams.
        return [function(item) for item in items]

    def here(self, value: Any) -> Any:
        """Bring a value to where the pipeline begins."""
        return bring(value, self._devices[0])

    def run(
        self,
        inputs: Any,
        start: int,
        position: DrawPosition,
        whole: bool,
        end: int | None = None,
    ) -> Any:
        """Return what layer ``end - 1`` gives for a batch.

        Args:
            inputs: Of layer `start`.
            start: The first layer.
            position: Keys of the random draws; with `whole` the batch is the
                micro-batch that it names.
            whole: Run it as one micro-batch of unchanged shape.
            end: The layer behind the last one; None: all run.
        """
        if not self._layers[start:end]:
            return self.here(inputs)
        self._needed = self._needed or not whole  # else it is an evaluation
        self.wake()
        most = self._workers.num_workers
        if self._passed_on or self.fills:
            most = self._num_microbatches
        cut = self._cut(inputs, position, 1 if whole or self._in_one else most)
        forward = self._forward(position, start, end)
        before = _versions(inputs)
        with self._clock.phase("prefix"), torch.no_grad():
            alone = len(cut) == 1
            outputs = [forward(cut[0])] if alone else self.spread(forward, cut)
            last = len(self._layers) if end is None else end
            if _versions(inputs) != before and not fit_together(outputs):
                raise TypeError(
                    f"layers {start} to {last - 1}: expected outputs of one size for "
                    "all micro-batches, or inputs that stay as they are, got neither"
                )
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
                    there = bring(piece, self._places[start])
                    chunk = self._layers[start:end]
                    return self.here(run_in_place(chunk, there, first=start == 0))
            device = self._devices[number % len(self._devices)]
            layers = self._on[device][start:end]
            with use_skip_tracker(SkipTracker()), draws:
                taken = bring(piece, device)
                return self.here(call_layers(layers, taken, first=start == 0))

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

        Layers may pad to the longest row that they are given, such as those that pack
        sequences; the batch then runs in one piece, as all that follow.

        Args:
            outputs: What layer ``end - 1`` has returned for each.
            inputs: Of the batch.
            cut: The micro-batches, with their numbers.
            forward: Runs one of them again.
            end: The layer behind.
        """
        if len(outputs) > 1 and not fit_together(outputs):
            self._in_one = True
            cut = [(cut[0][0], inputs)]
            outputs = [forward(cut[0])]
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

    # -- a batch to come -------------------------------------------------------

    def run_ahead(
        self,
        inputs: Callable[[], Any],
        ids: Tensor,
        *,
        position: DrawPosition,
    ) -> None:
        """Let workers compute a batch to come while they have nothing else to do.

        Args:
            inputs: Gives the batch's inputs.
            ids: Its sample ids, the very tensor that it will be asked for with.
            position: Keys of its random draws.
        """
        if self._ahead is not None and self._ahead.is_of(ids, position):
            return
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

    def run_filled(self, inputs: Any, ids: Tensor, *, position: DrawPosition) -> Any:
        """Return what `run` gives for a whole batch, as far as it is not there yet.

        Args:
            inputs: Of the batch; run again if they, or the layers, have changed.
            ids: As `run_ahead` was given them.
            position: Keys of the random draws; the same.
        """
        self._hold_still()  # the workers may have parts left
        held, self._ahead = self._ahead, None
        known = held is not None and held.is_of(ids, position)
        if held is None or not known or held.state != self._state(inputs):
            if held is not None:
                held.forward.cancel()
            held = self._begin(inputs, ids, position)
        with self._clock.phase("prefix"), torch.no_grad():
            outputs = held.forward.outputs()
            most = 1 if self._in_one else self._num_microbatches
            cut = self._cut(inputs, position, most)
            forward, end = self._forward(position, 0), len(self._layers)
            return self._joined(outputs, inputs, cut, forward, end)

    def _begin(self, inputs: Any, ids: Tensor, position: DrawPosition) -> Ahead:
        self._hold_still()
        state = self._state(inputs)
        most = 1 if self._in_one else self._num_microbatches
        cut = self._cut(self.here(inputs), position, most)
        forward = FilledForward(
            self._workers,
            self._to_fill,
            [piece for _, piece in cut],
            seed=self._seed,
            position=position,
            first=cut[0][0],
        )
        return Ahead(ids, position, inputs, state, forward)

    def _state(self, inputs: Any) -> object:
        """Return what tells whether values were computed from what is there now."""
        held = (t for x in self._layers for t in (*x.parameters(), *x.buffers()))
        return state_of(inputs, held, self.context())


def _versions(inputs: Any) -> list[int]:
    """Return what tells whether layers have worked in place."""
    return list(map(version_of, tensors_of(inputs)))


def _copied(layers: Sequence[nn.Module], device: torch.device) -> list[nn.Module]:
    """Return copies of layers on another device; what they share, copies share."""
    memo: dict[int, Any] = {}
    for layer in layers:
        for parameter in layer.parameters():
            moved = parameter.detach().to(device)
            memo[id(parameter)] = nn.Parameter(moved, requires_grad=False)
        memo.update((id(buffer), buffer.to(device)) for buffer in layer.buffers())
    return [copy.deepcopy(layer, memo) for layer in layers]
