"""Puts the modules of this room under the old import names."""

from __future__ import annotations

import importlib
import sys

from pipetransformer.compat.torchgpipe.missing import MissingBalancing
from pipetransformer.pipe.strict import set_strict

_ROOM = "pipetransformer.compat"
_PIPELINE = "torch.distributed.pipeline"
_SYNC = f"{_ROOM}.pipeline.sync"

# What follows the name of the package -> the module that stands for it.
_SKIP_MODULES = {
    "skip.layout": f"{_SYNC}.skip.layout",
    "skip.namespace": f"{_SYNC}.skip.namespace",
    "skip.skippable": f"{_SYNC}.skip.decorator",
    "skip.tracker": f"{_SYNC}.skip.tracker",
}
_SYNC_MODULES = {
    "_balance": f"{_SYNC}._balance",
    "_balance.blockpartition": f"{_SYNC}._balance.blockpartition",
    "_balance.profile": f"{_SYNC}._balance.profile",
    "batchnorm": f"{_SYNC}.batchnorm",
    "checkpoint": f"{_SYNC}.checkpoint",
    "microbatch": f"{_SYNC}.microbatch",
    "pipe": f"{_SYNC}.pipe",
    "skip": f"{_SYNC}.skip",
    **_SKIP_MODULES,
    "utils": f"{_SYNC}.utils",
}
_TORCHGPIPE_MODULES = {
    "__version__": f"{_ROOM}.torchgpipe.version",
    "balance": f"{_ROOM}.torchgpipe.balance",
    "balance.blockpartition": f"{_ROOM}.torchgpipe.balance.blockpartition",
    "balance.profile": f"{_ROOM}.torchgpipe.balance.profile",
    "batchnorm": f"{_SYNC}.batchnorm",
    "checkpoint": f"{_SYNC}.checkpoint",
    "gpipe": f"{_ROOM}.torchgpipe.gpipe",
    "microbatch": f"{_ROOM}.torchgpipe.microbatch",
    "skip": f"{_ROOM}.torchgpipe.skip",
    **_SKIP_MODULES,
}


def install(strict: bool = False, torchgpipe: bool = False) -> None:
    """Make ``torch.distributed.pipeline`` importable again; may be called again.

    The names are those of `pipetransformer.pipe`, the same objects.

    Args:
        strict: Follow the old interface exactly from here on, as with
            ``PIPETRANSFORMER_STRICT_COMPAT=1``. False leaves the switch as it is.
        torchgpipe: Also make ``torchgpipe`` importable.

    Raises:
        RuntimeError: if another module already has one of the names.

    Example:
        >>> import pipetransformer.compat
        >>> pipetransformer.compat.install()
        >>> from torch.distributed.pipeline.sync import Pipe
    """
    names = {_PIPELINE: f"{_ROOM}.pipeline", f"{_PIPELINE}.sync": _SYNC}
    names.update({f"{_PIPELINE}.sync.{k}": v for k, v in _SYNC_MODULES.items()})
    if torchgpipe:
        names["torchgpipe"] = f"{_ROOM}.torchgpipe"
        names.update({f"torchgpipe.{k}": v for k, v in _TORCHGPIPE_MODULES.items()})
    modules = {old: importlib.import_module(name) for old, name in names.items()}
    for old, module in modules.items():
        if sys.modules.get(old, module) is not module:
            raise RuntimeError(
                f"{old}: expected no such module before install(), got "
                f"{sys.modules[old]!r}"
            )
    for old, module in modules.items():
        sys.modules[old] = module
        parent, _, name = old.rpartition(".")
        # As importing does; what the parent calls so itself stays, such as the
        # decorator, or the version, alongside the module of its name.
        if parent and not hasattr(sys.modules[parent], name):
            setattr(sys.modules[parent], name, module)
    if torchgpipe and not any(isinstance(f, MissingBalancing) for f in sys.meta_path):
        sys.meta_path.insert(0, MissingBalancing())
    if strict:
        set_strict(True)
