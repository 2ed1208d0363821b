"""A stage call with the skip tensors that come in and go out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipetransformer.skip.layout import Lane
from pipetransformer.skip.tracker import SkipTracker, use_skip_tracker

Skips = tuple["torch.Tensor | None", ...]


def with_own_tracker(function: Callable[..., object]) -> Callable[..., object]:
    """Let a stage function whose skips all stay inside keep them for one call only.

    Args:
        function: The stage function.

    Returns:
        A function like it; a call that fails leaves no skip tensor in the thread.
    """

    def call(*args: object, **kwargs: object) -> object:
        with use_skip_tracker(SkipTracker()):
            return function(*args, **kwargs)

    return call


def with_lanes(
    function: Callable[..., object],
    popped: Sequence[Lane],
    stashed: Sequence[Lane],
    unused: set[Lane],
) -> Callable[..., tuple[object, Skips]]:
    """Let a stage function take and give the skip tensors of its lanes.

    Args:
        function: The stage function.
        popped: Lanes that end in the stage.
        stashed: Lanes that begin in the stage.
        unused: Lanes into which nothing was stashed, since a layer dispatches its
            skips in another way; shared and filled by the stages of one call of the
            pipeline. Such a lane gives None, and a pop from it finds nothing.

    Returns:
        A function of one value per popped lane (a tuple, or a list, which is emptied
        so that no reference stays there) and the arguments of ``function``. It
        returns the output and one value per stashed lane, and keeps none of them.
    """
    popped, stashed = tuple(popped), tuple(stashed)

    def call(
        values: Skips | list[torch.Tensor | None], *args: object, **kwargs: object
    ) -> tuple[object, Skips]:
        tracker = SkipTracker()
        for lane, value in zip(popped, values, strict=True):
            if value is not None or lane not in unused:
                tracker.save(lane.namespace, lane.name, value)
            del value
        if isinstance(values, list):
            values.clear()
        del values
        with use_skip_tracker(tracker):
            output = function(*args, **kwargs)
        left = tracker.load_all()
        keys = [(lane.namespace, lane.name) for lane in stashed]
        unused.update(
            lane for lane, k in zip(stashed, keys, strict=True) if k not in left
        )
        return output, tuple(left.get(key) for key in keys)

    return call
