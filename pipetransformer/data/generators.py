"""States of the global random generators: read, compared, put back."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class GlobalGenerators:
    """States of the global generators that a user's layers or loss may draw from."""

    host: Tensor
    accelerators: dict[torch.device, Tensor]
    python: tuple[Any, ...]
    numpy: Any  # None as long as nobody has imported it

    @classmethod
    def now(cls, devices: set[torch.device]) -> GlobalGenerators:
        """Read the host's, and those of the accelerators among `devices`."""
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.get_rng_state(),
            {
                device: torch.get_device_module(device).get_rng_state(device)
                for device in devices
                if device.type not in ("cpu", "meta")
            },
            random.getstate(),
            numpy.get_state(legacy=False) if numpy is not None else None,
        )

    def equals(self, other: GlobalGenerators) -> bool:
        """Tell whether nothing was drawn between the two."""
        return (
            torch.equal(self.host, other.host)
            and all(
                torch.equal(state, other.accelerators[device])
                for device, state in self.accelerators.items()
            )
            and self.python == other.python
            and str(self.numpy) == str(other.numpy)
        )

    def restore(self) -> None:
        """Put them back into these states."""
        torch.set_rng_state(self.host)
        for device, state in self.accelerators.items():
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)
