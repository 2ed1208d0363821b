"""Room ``adapters``: supported models -> ``nn.Sequential`` of layers."""

from pipetransformer.adapters.sequential import sequential

__all__ = ["sequential"]
