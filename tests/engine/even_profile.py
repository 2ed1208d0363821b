"""Profiles of equal layers, so that plans follow from bytes and rows alone.

Nor are the cache's rates measured, so everything that can be cached is.

A measured profile depends on what else the machine does: which K, M and cache tier
win would differ from run to run.
"""

import dataclasses

from pipetransformer import planner

ROW_NS = 100_000  # of a layer, forward or either half of its backward
TIMES = ("forward_ns", "input_grad_ns", "weight_grad_ns", "forward_only_ns")

measured_profile = planner.profile


def even(profile):
    """The profile with equal layers whose time is that of their rows."""
    times = {
        name: tuple(ROW_NS * m for m in profile.microbatch_samples) for name in TIMES
    }
    layers = tuple(
        dataclasses.replace(layer, **times, optimizer_ns=0) for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=layers)


def no_rates(*args, **options):
    """Stands for `autocache.measure_rates`: they are not known."""


def even_profile(*args, **options):
    """Stands for `planner.profile`: bytes are measured, times are not."""
    return even(measured_profile(*args, **options))
