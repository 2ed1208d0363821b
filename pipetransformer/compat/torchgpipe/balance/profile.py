"""Stands for ``torchgpipe.balance.profile``: a tuple is one value, never spread."""

import functools

from pipetransformer.pipe.balance import profile
from pipetransformer.pipe.balance.profile import layerwise_sandbox

__all__ = ["layerwise_sandbox", "profile_sizes", "profile_times"]

profile_sizes = functools.partial(profile.profile_sizes, spread=False)
profile_times = functools.partial(profile.profile_times, spread=False)
