"""Elastic pipelined fine-tuning of ``nn.Sequential`` models.

Names are imported when they are first used: ``import pipetransformer`` alone loads
neither torch nor the C++ extension, so that the command line starts at once and
``pipetransformer doctor`` can tell why an extension does not load.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipetransformer import autofreeze as freeze
    from pipetransformer import report
    from pipetransformer.autocache import Ragged
    from pipetransformer.autodp import AutoDPConfig, PeerFailure
    from pipetransformer.checkpoint import export_checkpoint
    from pipetransformer.config import (
        CacheConfig,
        CheckpointConfig,
        Config,
        PipeConfig,
        PlanConfig,
    )
    from pipetransformer.data import Batch
    from pipetransformer.engine import PipeTransformer
    from pipetransformer.pipe import Pipe
    from pipetransformer.planner import InfeasiblePlan, Plan

__version__ = "0.2.0"
__all__ = [
    "AutoDPConfig",
    "Batch",
    "CacheConfig",
    "CheckpointConfig",
    "Config",
    "InfeasiblePlan",
    "PeerFailure",
    "Pipe",
    "PipeConfig",
    "PipeTransformer",
    "Plan",
    "PlanConfig",
    "Ragged",
    "export_checkpoint",
    "freeze",
    "report",
]

# Where the public names live.
_HOMES = {
    "AutoDPConfig": "autodp",
    "Batch": "data",
    "CacheConfig": "config",
    "CheckpointConfig": "config",
    "Config": "config",
    "InfeasiblePlan": "planner",
    "PeerFailure": "autodp",
    "Pipe": "pipe",
    "PipeConfig": "config",
    "PipeTransformer": "engine",
    "Plan": "planner",
    "PlanConfig": "config",
    "Ragged": "autocache",
    "export_checkpoint": "checkpoint",
}

if not TYPE_CHECKING:  # type checkers know the names from above, and no others

    def __getattr__(name):
        """Import a public name, or a module of this package, on its first use."""
        if name == "_C":
            from pipetransformer._extension import load

            return load()
        if name in _HOMES:
            value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif name == "freeze":
            value = _import_module(f"{__name__}.autofreeze")
        elif not name.startswith("__") and _find_spec(f"{__name__}.{name}"):
            value = _import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
