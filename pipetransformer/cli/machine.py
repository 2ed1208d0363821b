"""Reads from the system what the doctor judges: one dataclass of plain facts."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import itertools
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipetransformer.cli.network import Network, look_up_network

EXTRAS = {"cli": ("rich",), "examples": ("numpy", "sklearn")}
_IO_URING_SETUP = 425  # the same number on all of Linux's architectures
_NO_IO_URING = {errno.ENOSYS: "the kernel has none", errno.EPERM: "it is forbidden"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the doctor knows of the machine; sizes in bytes.

    Args:
        python: version.
        torch: version; empty if it cannot be imported.
        torch_error: why not.
        extension_error: why the extension does not load; empty if it does.
        built_for: torch version that the extension was built for; empty: no build.
        kernels: whether CUDA kernels are built in.
        nvcc: where nvcc is; empty if it is not found.
        gloo: whether torch has gloo.
        nccl: whether torch has nccl.
        cuda_devices: name and memory of each.
        cuda_error: why they cannot be asked; empty if they can.
        direct_pairs: ordered pairs of them where one reads the other's memory.
        cores: of the machine, as ``os.cpu_count`` counts.
        usable_cores: what affinity leaves of them, and the job's cgroups if the
            extension loads.
        network: what decides the interface.
        shared_memory: size and free bytes of /dev/shm; None if it is not there.
        locked_memory: limit on locked memory; None: no limit.
        memory: of the machine; None: not read, because the extension does not load.
        memory_limit: what this process's job may use of it; None likewise.
        memory_limited_by: the cgroup that sets a lower limit; empty if none does.
        io_uring: why it cannot be used; empty if it can.
        extras: missing modules of each optional extra.
    """

    python: tuple[int, int, int]
    torch: str
    torch_error: str
    extension_error: str
    built_for: str
    kernels: bool
    nvcc: str
    gloo: bool
    nccl: bool
    cuda_devices: tuple[tuple[str, int], ...]
    cuda_error: str
    direct_pairs: int
    cores: int
    usable_cores: float
    network: Network
    shared_memory: tuple[int, int] | None
    locked_memory: int | None
    memory: int | None
    memory_limit: int | None
    memory_limited_by: str
    io_uring: str
    extras: Mapping[str, tuple[str, ...]]


def read_facts(environ: Mapping[str, str]) -> Facts:
    """Look at the machine; imports torch and loads the extension."""
    version, torch_error = _import_torch()
    built_for, kernels = _build_info()
    gloo, nccl = _backends() if version else (False, False)
    devices, direct_pairs, cuda_error = _cuda() if version else ((), 0, "")
    extension_error = _extension_error() if version else "it needs torch"
    memory = None
    usable_cores: float = len(os.sched_getaffinity(0))
    if not extension_error:
        from pipetransformer._extension import host_cores, host_memory

        memory = host_memory()
        usable_cores = min(usable_cores, host_cores())
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        python=sys.version_info[:3],
        torch=version,
        torch_error=torch_error,
        extension_error=extension_error,
        built_for=built_for,
        kernels=kernels,
        nvcc=_nvcc(environ),
        gloo=gloo,
        nccl=nccl,
        cuda_devices=devices,
        cuda_error=cuda_error,
        direct_pairs=direct_pairs,
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores,
        network=look_up_network(environ),
        shared_memory=_shared_memory(),
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        memory=memory.total_bytes if memory else None,
        memory_limit=memory.limit_bytes if memory else None,
        memory_limited_by=memory.limited_by if memory else "",
        io_uring=_io_uring(),
        extras={
            extra: tuple(m for m in modules if importlib.util.find_spec(m) is None)
            for extra, modules in EXTRAS.items()
        },
    )


def _import_torch() -> tuple[str, str]:
    try:
        return str(importlib.import_module("torch").__version__), ""
    except (ImportError, OSError) as error:  # OSError: one of its libraries
        return "", str(error)


def _build_info() -> tuple[str, bool]:
    try:
        info = importlib.import_module("pipetransformer._build_info")
    except ModuleNotFoundError:
        return "", False
    return str(info.TORCH_VERSION), bool(info.WITH_CUDA_KERNELS)


def _extension_error() -> str:
    from pipetransformer._extension import load

    try:
        load()
    except ImportError as error:
        return str(error)
    return ""


def _backends() -> tuple[bool, bool]:
    import torch.distributed as dist

    found = dist.is_available()
    return found and dist.is_gloo_available(), found and dist.is_nccl_available()


def _cuda() -> tuple[tuple[tuple[str, int], ...], int, str]:
    """Return the devices, the pairs with direct access, and what kept one from both."""
    import torch

    devices: list[tuple[str, int]] = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append((str(properties.name), int(properties.total_memory)))
        pairs = itertools.permutations(range(len(devices)), 2)
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    except RuntimeError as error:  # of the driver, or a device that is broken or taken
        return tuple(devices), 0, str(error).partition("\n")[0]
    return tuple(devices), direct, ""


def _nvcc(environ: Mapping[str, str]) -> str:
    home = environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").exists():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _shared_memory() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def _io_uring() -> str:
    if platform.system() != "Linux":
        return "the system is not Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    # Zero entries at no address: refused as invalid wherever the call exists.
    libc.syscall(_IO_URING_SETUP, 0, None)
    number = ctypes.get_errno()
    setting = _text(Path("/proc/sys/kernel/io_uring_disabled"))
    reason = _NO_IO_URING.get(number, "")
    if reason and setting not in ("", "0"):
        reason = f"kernel.io_uring_disabled is {setting}"
    return reason
