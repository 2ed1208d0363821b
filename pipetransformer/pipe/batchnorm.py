"""Batch norm whose running statistics see the mini-batch as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from pipetransformer.pipe.phases import is_recomputing

_ACCUMULATORS = ("sum", "sum_squares")


def accumulator_names(module: nn.Module) -> frozenset[str]:
    """Return the names under which a module holds accumulators of deferred norms.

    They tell nothing about a trained model, so state without them is as good.
    """
    return frozenset(
        f"{path}.{name}" if path else name
        for path, norm in module.named_modules(remove_duplicate=False)
        if isinstance(norm, DeferredBatchNorm)
        for name in _ACCUMULATORS
    )


class DeferredBatchNorm(_BatchNorm):
    """Batch norm that updates its running statistics once per mini-batch.

    In train mode each micro-batch is normalised by its own statistics; the running
    ones are updated from all micro-batches together, with the biased variance of the
    mini-batch. Recomputation does not count. In a `Pipe` the update comes after the
    last micro-batch that exists; elsewhere after ``chunks`` forward calls.

    The buffers ``sum`` and ``sum_squares`` are in the ``state_dict``, as they were in
    torch's and torchgpipe's: per channel, over the micro-batches of a mini-batch that
    is under way. They are zero between mini-batches, and in a `Pipe` after every
    training call. How many values they are of (``counter``, ``tracked``) is in no
    ``state_dict``, so loading one begins a new mini-batch. One without the two loads
    as well.

    Args:
        num_features: Channels, C of an input ``(rows, C, ...)``.
        eps: Added to the variance.
        momentum: Weight of a mini-batch in the running statistics; None: the
            cumulative average.
        affine: Whether to learn a scale and a shift.
        chunks: Micro-batches of a mini-batch, at least 1.

    Attributes:
        sum: Sums, ``(C,)``, of the running statistics' dtype.
        sum_squares: Sums of squares, likewise.
        counter: Values per channel since the mini-batch began.
        tracked: Micro-batches since then.

    Raises:
        ValueError: if ``chunks`` is below 1.
    """

    sum: torch.Tensor
    sum_squares: torch.Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self._set_up(chunks)

    @classmethod
    def convert_deferred_batch_norm(
        cls, module: nn.Module, chunks: int = 1
    ) -> nn.Module:
        """Replace the batch norms in a module by deferred ones, in place.

        Parameters, buffers, mode and hooks are kept, not copied; the accumulators come
        on top. Layers without
        running statistics, lazy ones and ``SyncBatchNorm`` stay as they are.

        Args:
            module: The module; its children are replaced at any depth.
            chunks: Micro-batches of a mini-batch, at least 1.

        Returns:
            The module, or what replaces it if it is a batch norm itself.

        Raises:
            ValueError: if ``chunks`` is below 1.
        """
        _check_chunks(chunks)
        return cls._convert(module, chunks, {})

    @classmethod
    def _convert(
        cls, module: nn.Module, chunks: int, done: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        # A layer that stands at two places must stay one layer.
        if module not in done:
            done[module] = module
            if cls._is_to_convert(module, chunks):
                converted = cls.__new__(cls)
                converted.__dict__.update(module.__dict__)
                converted._set_up(chunks)
                done[module] = converted
            for name, child in list(module._modules.items()):
                if child is not None:
                    module._modules[name] = cls._convert(child, chunks, done)
        return done[module]

    @classmethod
    def _is_to_convert(cls, module: nn.Module, chunks: int) -> bool:
        if isinstance(module, DeferredBatchNorm):
            return module.chunks != chunks
        return (
            isinstance(module, _BatchNorm)
            and module.track_running_stats
            and not isinstance(module, (nn.SyncBatchNorm, LazyModuleMixin))
        )

    def _set_up(self, chunks: int) -> None:
        _check_chunks(chunks)
        self.chunks = chunks
        self._in_pipe = False
        # The layer that is replaced gets no new buffers.
        self._buffers = self._buffers.copy()
        for name in _ACCUMULATORS:
            self.register_buffer(name, torch.zeros_like(self._running()[0]))
        self._restart()

    def _restart(self) -> None:
        self.counter = self.tracked = 0
        # Mean and variance of the mini-batch so far.
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        for buffer in (self.sum, self.sum_squares):
            buffer.zero_()

    def reset_running_stats(self) -> None:
        """Set the running statistics to those of a new layer."""
        super().reset_running_stats()
        if "sum" in self._buffers:  # not while the base class is constructed
            self._restart()

    def begin(self) -> None:
        """Forget unfinished statistics; `finish` ends the mini-batch from here on."""
        self._in_pipe = True
        self._restart()

    def abort(self) -> None:
        """Forget the mini-batch that `begin` began: its call has failed."""
        self._in_pipe = False
        self._restart()

    def finish(self) -> None:
        """Update the running statistics from the micro-batches seen since `begin`.

        Does nothing when there were none, as in eval mode.
        """
        self._in_pipe = False
        moments = self._moments
        self._restart()
        if moments is not None:
            self._update(*moments)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a micro-batch.

        Args:
            input: Tensor ``(rows, C, ...)``.

        Returns:
            A tensor of the same shape.

        Raises:
            ValueError: if the input has fewer than two dimensions.
        """
        if input.dim() < 2:
            raise ValueError(
                f"batch norm input: expected at least two dimensions, got {input.dim()}"
            )
        if not self.training:
            return self._normalise(input, self.running_mean, self.running_var)
        count = input.numel() // max(input.size(1), 1)
        if count == 0 or is_recomputing():
            return self._normalise(input, None, None)
        # With a momentum of 1 the kernel leaves there what it normalised with, so
        # the statistics cost no second pass over the input.
        with torch.no_grad():
            mean, var = (torch.zeros_like(b) for b in self._running())
        output = self._normalise(input, mean, var)
        with torch.no_grad():
            self._add(count, mean, var * ((count - 1) / count))
        return output

    def _normalise(
        self, input: torch.Tensor, mean: torch.Tensor | None, var: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.batch_norm(
            input, mean, var, self.weight, self.bias, self.training, 1.0, self.eps
        )

    def _running(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.running_mean is not None and self.running_var is not None
        return self.running_mean, self.running_var

    def _add(self, count: int, mean: torch.Tensor, var: torch.Tensor) -> None:
        # Means and variances instead of sums of squares, which cancel when the mean
        # is large. Source: Chan, Golub and LeVeque, "Updating formulae".
        total = self.counter + count
        if self._moments is not None:
            old_mean, old_var = self._moments
            share, delta = count / total, mean - old_mean
            mean = old_mean + delta * share
            spread = share * self.counter / total
            var = torch.lerp(old_var, var, share) + delta**2 * spread
        self.counter, self._moments = total, (mean, var)
        self.tracked += 1
        if self._in_pipe:
            return  # nobody reads the sums before `finish`
        if self.tracked == self.chunks:
            self.finish()
        else:
            self.sum.copy_(mean * total)
            self.sum_squares.copy_((var + mean**2) * total)

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        factor: torch.Tensor | float | None = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                # A tensor: nobody waits for the device.
                factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
        for running, new in zip(self._running(), (mean, var), strict=True):
            running.add_((new - running) * (0.0 if factor is None else factor))

    def _load_from_state_dict(
        self, state_dict: dict[str, torch.Tensor], prefix: str, *args: object
    ) -> None:
        # Our first checkpoints, and those of plain batch norm, have no accumulators:
        # theirs are those between mini-batches.
        mean = state_dict.get(f"{prefix}running_mean")
        if mean is not None:
            self._restart()
            for name in _ACCUMULATORS:
                state_dict.setdefault(prefix + name, mean.new_zeros(self.sum.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


def one_mini_batch(
    norms: Sequence[DeferredBatchNorm],
) -> AbstractContextManager[None]:
    """Let layers take what they see in this block for one mini-batch."""
    return _begun(norms) if norms else nullcontext()


@contextmanager
def _begun(norms: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    for norm in norms:
        norm.begin()
    try:
        yield
    except BaseException:
        for norm in norms:
            norm.abort()
        raise
    for norm in norms:
        norm.finish()


def _check_chunks(chunks: int) -> None:
    if chunks < 1:
        raise ValueError(f"chunks: expected at least 1, got {chunks}")
