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
    function: Callable[..., object], popped: Sequence[Lane], stashed: Sequence[Lane]
) -> Callable[..., tuple[object, Skips]]:
    """Let a stage function take and give the skip tensors of its lanes.

    Args:
        function: The stage function.
        popped: Lanes that end in the stage.
        stashed: Lanes that begin in the stage.

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
            tracker.save(lane.namespace, lane.name, value)
            del value
        if isinstance(values, list):
            values.clear()
        del values
        with use_skip_tracker(tracker):
            output = function(*args, **kwargs)
        return output, tuple(
            tracker.load(lane.namespace, lane.name) for lane in stashed
        )

    return call
