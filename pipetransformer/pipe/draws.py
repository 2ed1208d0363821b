"""Random draws keyed by (seed, step, micro-batch, layer)."""

from __future__ import annotations

import types

from pipetransformer import _C


def keyed_draws_work() -> bool:
    """Tell whether threads draw from generators of their own under `draw_scope`.

    Else they take turns with the process's default ones.
    """
    return _C.pipe.keyed_draws_work()


class draw_scope:  # noqa: N801 - used like torch.no_grad
    """Context in which random operations of this thread draw from keyed generators.

    Every operation that is given no generator (dropout, ``torch.rand``, ...) draws
    from one keyed by the four numbers; the default generators stay untouched. So
    draws do not depend on threads, stages or cuts, and are the same when repeated.
    Not re-entrant; make a new one each time. On an accelerator torch's kernels that
    take no generator are covered, too; those of other libraries draw from the
    device's default generator, and a pipeline that recomputes such a cell warns.

    Args:
        seed: Seed of the run, taken modulo 2**64. None takes one draw from the default
            CPU generator, or from that of an enclosing scope, if something draws.
        step: Optimizer step.
        microbatch: Micro-batch, numbered over all replicas.
        layer: Absolute index of the layer that draws first.

    Example:
        >>> with draw_scope(seed=0, step=3, microbatch=0) as draws:
        ...     for index, layer in enumerate(layers):
        ...         draws.set_layer(index)
        ...         x = layer(x)
    """

    def __init__(
        self, seed: int | None, step: int, *, microbatch: int, layer: int = 0
    ) -> None:
        self._scope = _C.pipe.DrawScope(
            None if seed is None else seed % 2**64,
            step,
            microbatch,
            layer,
            keyed_draws_work(),
        )

    def set_layer(self, layer: int) -> None:
        """Let the draws from here on belong to ``layer`` (absolute index)."""
        _C.pipe.set_draw_layer(layer)

    def __enter__(self) -> draw_scope:
        self._scope.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._scope.exit()
