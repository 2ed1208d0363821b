"""Room ``adapters``: supported models -> ``nn.Sequential`` of layers."""

from pipetransformer.adapters.adapted import Adapted, from_transformers
from pipetransformer.adapters.sequential import sequential

__all__ = ["Adapted", "from_transformers", "sequential"]
