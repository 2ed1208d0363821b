"""Batch norm whose running statistics see the mini-batch as a whole."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from pipetransformer.pipe.phases import is_recomputing

Module = TypeVar("Module", bound=nn.Module)
_Statistics = tuple[int, torch.Tensor, torch.Tensor]


class DeferredBatchNorm(_BatchNorm):
    """Batch norm that updates its running statistics once per mini-batch.

    In train mode each micro-batch is normalised by its own statistics; the running
    ones are updated from all micro-batches together, with the biased variance of the
    mini-batch. Recomputation does not count. In a `Pipe` the update comes after the
    last micro-batch that exists; elsewhere after ``chunks`` forward calls.

    Args:
        num_features: Channels, C of an input ``(rows, C, ...)``.
        eps: Added to the variance.
        momentum: Weight of a mini-batch in the running statistics; None: the
            cumulative average.
        affine: Whether to learn a scale and a shift.
        chunks: Micro-batches of a mini-batch, at least 1.

    Raises:
        ValueError: if ``chunks`` is below 1.
    """

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

        Parameters, buffers, mode and hooks are kept, not copied. Layers without
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
        self._num_seen = 0
        self._statistics: _Statistics | None = None

    def begin(self) -> None:
        """Forget unfinished statistics; `finish` ends the mini-batch from here on."""
        self._in_pipe = True
        self._num_seen, self._statistics = 0, None

    def finish(self) -> None:
        """Update the running statistics from the micro-batches seen since `begin`.

        Does nothing when there were none, as in eval mode.
        """
        self._in_pipe = False
        statistics, self._num_seen, self._statistics = self._statistics, 0, None
        if statistics is not None:
            self._update(*statistics)

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
        if self._statistics is not None:
            before, old_mean, old_var = self._statistics
            total = before + count
            share, delta = count / total, mean - old_mean
            mean = old_mean + delta * share
            var = torch.lerp(old_var, var, share) + delta**2 * (share * before / total)
            count = total
        self._statistics = (count, mean, var)
        self._num_seen += 1
        if not self._in_pipe and self._num_seen == self.chunks:
            self.finish()

    @torch.no_grad()
    def _update(self, count: int, mean: torch.Tensor, var: torch.Tensor) -> None:
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
        # Older checkpoints hold the unfinished sums.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _check_chunks(chunks: int) -> None:
    if chunks < 1:
        raise ValueError(f"chunks: expected at least 1, got {chunks}")
