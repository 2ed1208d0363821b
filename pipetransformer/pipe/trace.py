"""When the cells of all pipelines of this process ran."""

from __future__ import annotations

from pipetransformer import _C

CellSpan = tuple[str, int, int, int, int]
"""Kind (F, R, B, I or W), stage, micro-batch, begin and end in ns of the monotonic
clock: of the work on CPU, of its launch on accelerators. What one call of autograd
runs of several stages is one cell, of the stage where it begins. Of kind P is a part of
`Workers.spare`: the stage is then that of the worker, the micro-batch the item."""


def trace_cells(most: int) -> None:
    """Note cells from now on, the last so many until they are taken; 0: no more."""
    _C.pipe.trace_cells(most)


def take_cells() -> tuple[list[CellSpan], int]:
    """Return the last cells, in the order of their ends, and how many came before.

    A pipeline of one stage and one micro-batch is a plain module, without cells.
    """
    return _C.pipe.take_cells()
