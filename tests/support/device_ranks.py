"""Ranks whose stages are on the pretended accelerator."""

import dataclasses
import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from pipetransformer.autodp import group as group_module
from pipetransformer.autodp.backends import Backends, make_backends
from tests.support.fake_device import (
    COMPILER,
    ROOT,
    build_fake_device,
    build_library,
    load_fake_device,
)

SOURCE = ROOT / "tests/autodp/cpp/device_backend.cpp"
MARKS = [
    pytest.mark.distributed,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]
NODE = ("fake:0", "fake:1", "fake:2", "fake:3")


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Paths of the pretended accelerator and of the backends for its tensors."""

    device: str
    backends: str


def build_libraries():
    """Compile both, unless they are there."""
    return Libraries(str(build_fake_device()), str(build_library(SOURCE, python=True)))


def load_backends(libraries):
    """Return the module with the pretended backends."""
    spec = importlib.util.spec_from_file_location("device_backend", libraries.backends)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretend(libraries):
    """Register the accelerator; let groups carry its tensors through the host."""
    fake = load_fake_device(libraries.device)
    module = load_backends(libraries)

    def make(store, rank, size, **options):
        on_host = make_backends(store, rank, size, **options).on_host
        inside = c10d.PrefixStore("device", store)
        inner = dist.ProcessGroupGloo(inside, rank, size, options["timeout"])
        return Backends(on_host, module.HostedBackend(inner))

    group_module.make_backends = make
    # torch's own refuses where C++ holds a parameter too, as after a failure. On real
    # devices the parameter's data are exchanged.
    torch.utils.swap_tensors = torch._C._swap_tensor_impl
    return fake


def on_host(tree):
    """Return a result with its tensors on the host, as it travels to a test."""
    return pytree.tree_map(
        lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, tree
    )
