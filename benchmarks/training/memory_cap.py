"""The cap that the unfrozen model exceeds in fewer stages than there are slots."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pipetransformer import planner
from pipetransformer.planner import (
    Cluster,
    Profile,
    search,
)

MICROBATCHES_PER_STAGE = (1, 2, 4)  # that are tried


def memory_cap(
    model: nn.Sequential,
    inputs: torch.Tensor,
    *,
    slots: int,
    batch_size: int,
    frozen_boundary: int,
) -> int:
    """Return bytes per slot between what must fit and what must not.

    The unfrozen model fits in `slots` stages and in no fewer; once `frozen_boundary`
    layers are frozen, one slot holds what is left. On CPU the cap is the planner's
    account, not a physical limit. It follows from bytes alone: layers count as equally
    slow, since a busy machine would cut the stages elsewhere.

    Args:
        model: The model, unfrozen.
        inputs: A few rows of inputs; bytes per row are exact at any number.
        slots: Slots of the node.
        batch_size: Rows of a global batch.
        frozen_boundary: Layers frozen after the first freeze.

    Raises:
        ValueError: no such cap exists: what must fit is not below what must not, or
            there is one slot only.
    """
    if slots < 2:
        raise ValueError(f"slots: expected at least 2 for a memory cap, got {slots}")
    profile = _even(
        planner.profile(model, inputs, microbatch_samples=(len(inputs),), repeats=1)
    )

    def largest(num_stages: int, boundary: int) -> int:
        return _largest_stage(profile, slots, batch_size, num_stages, boundary)

    fits = max(largest(slots, 0), largest(1, frozen_boundary))
    too_large = min(largest(k, 0) for k in range(1, slots))
    if fits >= too_large:
        raise ValueError(
            f"memory cap: expected {slots} unfrozen stages and one frozen stage to "
            f"need less than fewer stages, got {fits} and {too_large} bytes"
        )
    return (fits + too_large) // 2


def _even(profile: Profile) -> Profile:
    """Return the profile with layers of equal times; bytes stay as measured."""
    times = tuple(1000 * rows for rows in profile.microbatch_samples)
    layers = [
        replace(
            layer,
            forward_ns=times,
            input_grad_ns=times,
            weight_grad_ns=times,
            forward_only_ns=times,
        )
        for layer in profile.layers
    ]
    return replace(profile, layers=tuple(layers))


def _largest_stage(
    profile: Profile, slots: int, batch_size: int, num_stages: int, boundary: int
) -> int:
    """Return the bytes of the largest stage, with the M that needs the fewest."""
    room = 2**50  # no cap: only the bytes are of interest
    cluster = Cluster(devices_per_node=slots, device_memory_bytes=room)
    least = []
    for factor in MICROBATCHES_PER_STAGE:
        plan = search(
            profile,
            cluster,
            global_batch=batch_size,
            boundary=boundary,
            num_stages=num_stages,
            num_microbatches=factor * num_stages,
            cache_tiers=("host",),
        )
        least.append(max(plan.bytes_per_stage))
    return min(least)
