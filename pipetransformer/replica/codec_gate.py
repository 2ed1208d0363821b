"""Whether a codec that rounds may be used: measured before anything is stored in it.

On the first training batches at a boundary, the active layers compute outputs and
gradients twice: with the activations as they are, and as the cache would serve them.
Nothing of that is seen from outside: modules are copies on the same weights, with
buffers of their own, and random generators are put back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipetransformer.autocache import Codec
from pipetransformer.core.containers import map_tensors
from pipetransformer.core.devices import beside
from pipetransformer.core.wire import printable
from pipetransformer.data.generators import GlobalGenerators
from pipetransformer.data.structures import as_real, call_layers, rows_of, tensors_of
from pipetransformer.pipe.no_chunk import unwrap_whole
from pipetransformer.report.codecs import LEAST_COSINE, CodecRecord
from pipetransformer.run.arguments import Loss, LossWeight
from pipetransformer.skip import SkipTracker, use_skip_tracker

_SAMPLES = 256
_NO_COSINE = "gradients with it are zero or not finite"

Compare = Callable[[Any, Any], None]
_M = TypeVar("_M", bound=nn.Module)


class CodecGate:
    """Decides on a codec for the records of one boundary of this process.

    Whatever goes wrong while it measures means that the codec is not used.

    Args:
        codec: What records are to be kept in; ``"native"`` needs no decision.
        layers: The active layers.
        boundary: Index of the first of them.
        loss: Of the user.
        loss_weight: How many the loss is the mean of; None: the rows.
        scaled: Gives the loss that backward runs from.
        now: Gives the epoch, and the optimizer steps done.
        tell: Is given the decision.
        decided: An earlier decision at this boundary; None: there is none.

    Source: gradient cosine as the criterion, see docs/cache.md.
    """

    def __init__(
        self,
        codec: Codec,
        layers: Sequence[nn.Module],
        *,
        boundary: int,
        loss: Loss,
        loss_weight: LossWeight | None,
        scaled: Callable[[Tensor], Tensor],
        now: Callable[[], tuple[int, int]],
        tell: Callable[[CodecRecord], None],
        decided: CodecRecord | None = None,
    ) -> None:
        self._codec = codec
        self._layers = list(layers)
        self._boundary = boundary
        self._loss = loss
        self._loss_weight = loss_weight
        self._scaled = scaled
        self._now = now
        self._tell = tell
        self._decided = decided
        self._sums = _Sums()
        self._epoch = -1  # of the first measured batch

    def terms(self, targets: Any) -> tuple[Codec, Compare | None]:
        """Return how records are read and written for the next training batch.

        Args:
            targets: Of the batch.

        Returns:
            The codec, and None once it is decided. Before, what is to be called with
            the activations as they are and as they would be read; until then nothing
            that was rounded may be used, and nothing be stored in the codec.
        """
        begun = self._decided is None and self._sums.samples > 0
        if begun and self._now()[0] != self._epoch:  # a pass over fewer samples
            self._decide()
        if self._decided is not None:
            return (self._codec if self._decided.passed else "native"), None
        if self._codec == "native" or not torch.is_grad_enabled():
            return "native", None
        return self._codec, lambda exact, served: self._measure(exact, served, targets)

    def _measure(self, exact: Any, served: Any, targets: Any) -> None:
        count = self._loss_weight
        devices = {p.device for layer in self._layers for p in layer.parameters()}
        generators = GlobalGenerators.now(devices)
        try:
            if count is not None and not float(count(targets)):
                return  # a loss of nothing
            mine = self._computed(exact, targets)
            generators.restore()
            other = self._computed(served, targets)
            began = not self._sums.samples
            self._sums.add(mine, other, rows_of(exact))
        except Exception as error:  # whatever a user's layers and loss raise
            told = printable(f"cannot be measured: {type(error).__name__}: {error}")
            self._decide(told)
            return
        finally:
            generators.restore()
        if began:
            self._epoch = self._now()[0]
        if self._sums.samples >= _SAMPLES:
            self._decide()

    def _computed(self, value: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs of the active layers, and the gradients of their weights."""
        layers = _twin(nn.ModuleList(self._layers)).eval()
        loss = _twin(self._loss) if isinstance(self._loss, nn.Module) else self._loss
        weights = [p for p in layers.parameters() if p.requires_grad]
        # Copies, since a layer or a loss may change them in place.
        inputs = map_tensors(unwrap_whole(value), torch.clone)
        with use_skip_tracker(SkipTracker()):
            outputs = call_layers(list(layers), inputs, first=False, follow=True)
            wanted = copy.deepcopy(beside(outputs, targets))
            value = self._scaled(loss(outputs, wanted))
        gradients = torch.autograd.grad(
            value, weights, allow_unused=True, materialize_grads=True
        )
        found = [as_real(t.detach()) for t in tensors_of(outputs)]
        outputs = [t for t in found if t.is_floating_point()]
        return outputs, [as_real(each) for each in gradients]

    def _decide(self, reason: str = "") -> None:
        epoch, step = self._now()
        sums, self._sums = self._sums, _Sums()
        cosine, error = sums.cosine(), sums.output_error()
        self._decided = CodecRecord(
            epoch=epoch,
            step=step,
            boundary=self._boundary,
            codec=self._codec,
            passed=not reason and cosine is not None and cosine >= LEAST_COSINE,
            samples=sums.samples,
            cosine=None if reason else cosine,
            output_error=None if reason else error,
            reason=reason or ("" if cosine is not None else _NO_COSINE),
        )
        self._tell(self._decided)


class _Sums:
    """Products of gradients and outputs, over batches."""

    def __init__(self) -> None:
        self.samples = 0
        self._gradients = [0.0, 0.0, 0.0]  # of both, of each with itself
        self._outputs = [0.0, 0.0]  # of the difference, of the exact ones

    def add(
        self,
        exact: tuple[list[Tensor], list[Tensor]],
        served: tuple[list[Tensor], list[Tensor]],
        rows: int,
    ) -> None:
        """Add a batch: outputs and gradients, exact and as served.

        One whose exact gradients are zero or not finite, as a scaled loss may have
        them, says nothing.
        """
        own = _products(exact[1], exact[1])
        if not 0.0 < own < math.inf:
            return
        self.samples += rows
        others = _products(exact[1], served[1]), own, _products(served[1], served[1])
        self._gradients = [a + b for a, b in zip(self._gradients, others, strict=True)]
        apart = [a - b for a, b in zip(served[0], exact[0], strict=True)]
        errors = _products(apart, apart), _products(exact[0], exact[0])
        self._outputs = [a + b for a, b in zip(self._outputs, errors, strict=True)]

    def cosine(self) -> float | None:
        """Return that of the gradients of all batches, at least 0; None: no number."""
        both, own, other = self._gradients
        value = both / math.sqrt(own * other) if own * other > 0 else math.nan
        return min(max(value, 0.0), 1.0) if math.isfinite(value) else None

    def output_error(self) -> float | None:
        """Return the relative error of the outputs of all batches; None: no number."""
        apart, whole = self._outputs
        value = math.sqrt(apart / whole) if whole > 0 else apart
        return value if math.isfinite(value) else None


def _products(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(
        float(torch.dot(a.flatten().float(), b.flatten().float()))
        for a, b in zip(one, other, strict=True)
    )


def _twin(module: _M) -> _M:
    """Return a copy of a module on the same weights; all else is its own."""
    shared: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, shared)
