"""The pretended accelerator: builds and loads it, and asks what it has seen."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import types

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests/pipe/cpp/fake_device.cpp"
COMPILER = shutil.which("g++")


def build_fake_device():
    """Compile the library unless it is there already; return its path."""
    return build_library(SOURCE)


def build_library(source, *, python=False):
    """Compile a file against torch unless that was done; return the library's path.

    With `python` it may use torch's bindings, and is a module when it defines one.
    """
    torch_dir = pathlib.Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes())
    key.update(f"{torch.__version__} {torch_dir} {sys.version}".encode())
    target = ROOT / "build" / "tests" / f"{source.stem}_{key.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        include = torch_dir / "include"
        command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        folders = [include, include / "torch/csrc/api/include"]
        if python:
            folders.append(pathlib.Path(sysconfig.get_path("include")))
        for folder in folders:
            command += ["-isystem", str(folder)]
        command += [str(source), f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
        command += ["-ltorch_python"] if python else []
        command += [f"-Wl,-rpath,{torch_dir / 'lib'}", "-o", str(partial)]
        subprocess.run(command, check=True, timeout=110)
        partial.replace(target)
    return target


def load_fake_device(path):
    """Register device type "fake" in this process, before any backward ran."""
    torch.ops.load_library(path)
    module = types.ModuleType("torch.fake")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module.device_count = lambda: 4
    fake = torch.ops.fake_device

    module.get_rng_state = lambda device: torch.tensor(
        fake.generator_position(torch.device(device).index)
    )
    module.set_rng_state = lambda state, device: fake.set_generator_position(
        torch.device(device).index, *state.tolist()
    )
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("fake", module)
    return fake


def place(layers, cuts, devices):
    """Move the layers of each stage to its device."""
    for first, last, device in zip(cuts[:-1], cuts[1:], devices, strict=True):
        for layer in layers[first:last]:
            layer.to(device)
    return layers
