"""Frozen layers of a batch to come, run by workers that have nothing else to do.

The forward of frozen layers does not depend on the update of the step before it, so
the gaps that a pipeline leaves can hold it (as DiffusionPipe does for frozen encoders,
Tian et al., MLSys 2024). A part is one layer for one micro-batch: a cell that gets
ready meanwhile waits for no more than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.core.containers import map_tensors
from pipetransformer.data.structures import layer_outputs, tensors_of
from pipetransformer.pipe import Workers, draw_scope
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.skip import SkipTracker, use_skip_tracker


class _Piece:
    """A micro-batch on its way through the layers.

    Args:
        layers: The layers.
        inputs: Of the micro-batch.
        seed: Of the random draws.
        step: Of the random draws.
        number: Of the micro-batch, for the random draws.

    Attributes:
        value: What the last layer that has run returned.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        inputs: Any,
        *,
        seed: int,
        step: int,
        number: int,
    ) -> None:
        self.value: Any = None
        self._left = len(layers)
        self._size = len(layers)
        self._outputs: Iterator[Any] | None = _outputs_for(layers, inputs)
        self._skips = SkipTracker()
        self._keys = seed, step, number

    def advance(self) -> bool:
        """Run the next layer; return whether more are left."""
        if self._outputs is None:
            raise RuntimeError("piece that is over; please report")
        seed, step, number = self._keys
        layer = self._size - self._left
        with (
            draw_scope(seed, step, microbatch=number, layer=layer),
            use_skip_tracker(self._skips),
        ):
            self.value = next(self._outputs)
        self._left -= 1
        if self._left == 0:
            self._outputs = None  # with what it holds
        return self._left > 0


def _outputs_for(layers: Sequence[nn.Module], inputs: Any) -> Iterator[Any]:
    """Yield each layer's outputs for copies of the inputs, made with the first.

    The first layer may work in place, and the inputs may be run again.
    """
    yield from layer_outputs(layers, map_tensors(inputs, torch.clone))


class FilledForward:
    """The frozen layers' forward of one batch, in parts on idle workers.

    It begins at once, in the grad mode and autocast of the call.

    Args:
        workers: Of the pipeline.
        layers: Frozen ones, at least one, in eval mode.
        pieces: Inputs of each micro-batch.
        seed: Of the random draws.
        position: Keys of the random draws.
        first: Number of the first micro-batch.
    """

    def __init__(
        self,
        workers: Workers,
        layers: Sequence[nn.Module],
        pieces: Sequence[Any],
        *,
        seed: int,
        position: DrawPosition,
        first: int,
    ) -> None:
        self._pieces = [
            _Piece(layers, piece, seed=seed, step=position.step, number=number)
            for number, piece in enumerate(pieces, first)
        ]
        with torch.no_grad():
            self._run = workers.spare(_Piece.advance, self._pieces)

    def outputs(self) -> list[Any]:
        """Wait for all, and return what each micro-batch gave.

        Raises:
            Exception: what a layer has raised.
        """
        self._run.wait()
        return [piece.value for piece in self._pieces]

    def cancel(self) -> None:
        """Let the parts that run end, and begin no more."""
        self._run.cancel()


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
    """What is under way for a batch to come.

    Attributes:
        ids: Of its samples: the very tensor of the batch.
        position: The keys of its random draws, as they will be.
        inputs: Its inputs.
        state: What its values depend on besides, as `state_of` gave it.
        forward: The frozen layers' forward.
    """

    ids: Tensor
    position: DrawPosition
    inputs: Any
    state: object
    forward: FilledForward

    def is_of(self, ids: Tensor, position: DrawPosition) -> bool:
        """Tell whether it is for this batch and these draws."""
        return self.ids is ids and self.position == position


def in_mode_of_their_own(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules that are the layers in all but their modes, which stay.

    They hold the layers' own parameters, buffers, hooks and other attributes; what a
    compiler has made of a module is itself.
    """
    known: dict[nn.Module, nn.Module] = {}

    def twin_of(module: nn.Module) -> nn.Module:
        if _is_compiled(module):
            return module
        if module not in known:
            # Nothing of the module's own making: it may ask for arguments.
            twin = known[module] = object.__new__(type(module))
            children = {
                name: None if child is None else twin_of(child)
                for name, child in module._modules.items()
            }
            held = {**vars(module), "_modules": children}
            object.__setattr__(twin, "__dict__", held)
        return known[module]

    return [twin_of(layer) for layer in layers]


def _is_compiled(module: nn.Module) -> bool:
    made = isinstance(module, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule))
    return made or getattr(module, "_compiled_call_impl", None) is not None


def state_of(inputs: Any, tensors: Iterable[Tensor], context: object) -> object:
    """Return what tells whether values were computed from what is there now.

    A tensor that is changed in place counts as another one; changes through ``.data``
    are not seen.

    Args:
        inputs: Of the batch; tensors in a structure, compared by identity.
        tensors: Weights and buffers of the layers.
        context: What the values depend on besides.
    """
    given = tuple((id(each), version_of(each)) for each in tensors_of(inputs))
    return context, given, tuple(map(version_of, tensors))


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each change in place; 0: it is not told."""
    return 0 if tensor.is_inference() else tensor._version
