"""The one place that loads ``pipetransformer._C``, with a readable failure."""

from __future__ import annotations

import importlib
import importlib.util
import os
import types
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pipetransformer import _C

# Without --no-cache-dir pip takes the wheel that it kept of the wrong build.
_REBUILD = (
    "rebuild it in this environment: pip install --no-build-isolation "
    "--no-cache-dir --force-reinstall --no-deps pipetransformer (or, in a checkout: "
    "python setup.py build_ext --inplace)"
)


def load() -> types.ModuleType:
    """Import the C++ extension.

    Returns:
        The module ``pipetransformer._C``.

    Raises:
        ImportError: if the extension is missing, was built for another torch, or
            cannot be loaded; the text says which torch it was built for, which one
            is running, and how to rebuild.
    """
    running = torch.__version__
    try:
        info = importlib.import_module("pipetransformer._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            "pipetransformer._C: expected a built extension, got none "
            f"(running torch {running}); {_REBUILD}"
        ) from None
    built = str(info.TORCH_VERSION)
    if built != running:
        raise ImportError(
            f"pipetransformer._C: expected a build for torch {running}, got one for "
            f"torch {built}; {_REBUILD}"
        )
    try:
        # Without the file Python would take the folder of stubs for the module.
        spec = importlib.util.find_spec("pipetransformer._C")
        if spec is None or spec.origin is None:
            raise ImportError("no file that fits this Python")
        return importlib.import_module("pipetransformer._C")
    except ImportError as error:
        raise ImportError(
            f"pipetransformer._C: expected a loadable build for torch {running}, got "
            f"one for torch {built} that fails with: {error}; {_REBUILD}"
        ) from error


def hash_bytes(data: bytes) -> int:
    """Return the project's 64-bit content hash of `data` (``csrc/core/hash.h``)."""
    from pipetransformer import _C

    return _C.core.hash_bytes(data)


def host_cores(root: str = "") -> float:
    """Return how many cores this process's cgroups allow; infinite without a limit.

    Args:
        root: Holds another machine's ``proc`` and mounts; for tests.
    """
    from pipetransformer import _C

    return _C.core.host_cores(root)


def usable_cores() -> float:
    """Return how many cores this process may use: of its affinity and its cgroups."""
    return min(float(len(os.sched_getaffinity(0))), host_cores())


def host_memory(root: str = "") -> _C.core.HostMemory:
    """Return how much of its host's memory this process's job has, in bytes.

    The limits of its memory cgroups count (``csrc/core/host_memory.h``).

    Args:
        root: Holds another machine's ``proc`` and mounts; for tests.

    Raises:
        RuntimeError: the machine does not tell its memory.
    """
    from pipetransformer import _C

    return _C.core.host_memory(root)
