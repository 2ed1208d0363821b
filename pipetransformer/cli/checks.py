"""What the doctor thinks of the facts: pure functions, one or two findings each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipetransformer.cli.machine import Facts
from pipetransformer.network import choose, is_loopback, links_of

OK, NOTE, MISSING = "ok", "note", "missing"
_OLDEST_PYTHON = (3, 10)
_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 13)
_MIB, _GIB = 2**20, 2**30
_SMALL_SHARED_MEMORY = 256 * _MIB


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Args:
        name: what was looked at.
        status: ``"ok"``, ``"note"``, or ``"missing"`` if nothing works without it.
        value: what was found.
        advice: what to do; empty if nothing.
    """

    name: str
    status: str
    value: str
    advice: str = ""


def findings(facts: Facts) -> list[Finding]:
    """Judge a machine.

    Args:
        facts: what is known of it.

    Returns:
        The findings, in the order to print them.
    """
    checks = (
        python,
        torch,
        extension,
        kernels,
        devices,
        cores,
        groups,
        interface,
        route,
        nccl_transports,
        memory,
        shared_memory,
        locked_memory,
        io_uring,
        extras,
    )
    return [finding for check in checks for finding in check(facts)]


def python(facts: Facts) -> Iterator[Finding]:
    """Judge the interpreter."""
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < _OLDEST_PYTHON:
        yield Finding("python", MISSING, version, "install Python 3.10 or newer")
    else:
        yield Finding("python", OK, version)


def torch(facts: Facts) -> Iterator[Finding]:
    """Judge torch's version."""
    name = "torch"
    if not facts.torch:
        value = f"cannot be imported: {facts.torch_error}"
        yield Finding(name, MISSING, value, "install torch 2.11 to 2.13")
        return
    version = _release(facts.torch)
    if version < _OLDEST_TORCH:
        yield Finding(name, MISSING, facts.torch, "install torch 2.11 to 2.13")
    elif version > _NEWEST_TORCH:
        advice = "newer than tested (2.11 to 2.13): run the tests before you rely on it"
        yield Finding(name, NOTE, facts.torch, advice)
    else:
        yield Finding(name, OK, facts.torch)


def extension(facts: Facts) -> Iterator[Finding]:
    """Judge whether the C++ extension loads, and say why it does not."""
    built = f"built for torch {facts.built_for}" if facts.built_for else "not built"
    if not facts.extension_error:
        yield Finding("extension", OK, f"loads, {built}")
        return
    cause, _, advice = facts.extension_error.partition("; ")
    advice = advice or "see the lines above"
    yield Finding("extension", MISSING, f"{built}: {cause}", advice)


def kernels(facts: Facts) -> Iterator[Finding]:
    """Judge the CUDA kernels; each has a fallback of torch's operators."""
    name = "CUDA kernels"
    if facts.kernels:
        yield Finding(name, OK, "built in")
    elif not facts.cuda_devices:
        yield Finding(name, OK, "not built in, and no CUDA device needs them")
    else:
        missing = "" if facts.nvcc else "put nvcc on PATH or set CUDA_HOME, then "
        value = "not built in: torch's operators stand in for them, slower"
        yield Finding(name, NOTE, value, f"{missing}build the extension again")


def devices(facts: Facts) -> Iterator[Finding]:
    """List the CUDA devices."""
    name = "CUDA devices"
    if facts.cuda_error:
        value = f"cannot be used: {facts.cuda_error}"
        advice = "look at nvidia-smi, or leave devices out with CUDA_VISIBLE_DEVICES"
        yield Finding(name, MISSING, value, advice)
        return
    if not facts.cuda_devices:
        yield Finding(name, OK, "none: stages run on CPU slots")
        return
    shown = (f"{i} {d[0]} {_gib(d[1])}" for i, d in enumerate(facts.cuda_devices))
    yield Finding(name, OK, "; ".join(shown))


def cores(facts: Facts) -> Iterator[Finding]:
    """Judge the CPU: slots are processes on a node, or threads of one alone."""
    value = f"{facts.cores} cores"
    if facts.usable_cores >= facts.cores:
        value += "; slots: one per process of a node, or PipeConfig.num_slots"
        yield Finding("CPU", OK, value)
        return
    value += f", {facts.usable_cores:g} of them usable here"
    advice = (
        "set PipeConfig.threads_per_stage where processes are bound to the same cores: "
        "its default shares out those that cgroups allow"
    )
    yield Finding("CPU", NOTE, value, advice)


def groups(facts: Facts) -> Iterator[Finding]:
    """Judge whether processes can form groups."""
    name = "process groups"
    if facts.torch and not facts.gloo:
        advice = "install a torch with torch.distributed and gloo"
        yield Finding(name, MISSING, "torch has no gloo", advice)
    elif facts.cuda_devices and not facts.nccl:
        advice = "install a torch with nccl to train on CUDA devices"
        yield Finding(name, NOTE, "gloo, but no nccl", advice)
    elif facts.torch:
        yield Finding(name, OK, "gloo and nccl" if facts.nccl else "gloo")


def interface(facts: Facts) -> Iterator[Finding]:
    """Judge the interface that a run's groups on CPU take."""
    name, network = "network interface", facts.network
    if network.wanted:
        yield _named_interface(name, facts)
        return
    link = choose(
        network.interfaces,
        route=network.route_address,
        host_address=network.host_address,
    )
    if not is_loopback(link.address):
        yield Finding(name, OK, str(link))
        return
    outward = [i.name for i in network.interfaces.values() if not i.loopback]
    if not outward:
        yield Finding(name, OK, f"{link}; there is no other")
        return
    # With MASTER_ADDR elsewhere, a run takes the interface towards it.
    advice = "reaches this machine only; for several nodes set MASTER_ADDR, or "
    advice += f"AutoDPConfig.interface to one of {', '.join(outward)}"
    yield Finding(name, NOTE, str(link), advice)


def _named_interface(name: str, facts: Facts) -> Finding:
    wanted, network = "GLOO_SOCKET_IFNAME", facts.network
    try:
        links = links_of(
            network.wanted,
            network.interfaces,
            what=wanted,
            route=network.route_address,
        )
    except ValueError as error:
        advice = f"set {wanted} or AutoDPConfig.interface to one of them"
        return Finding(name, MISSING, str(error), advice)
    return Finding(name, OK, ", ".join(map(str, links)))


def nccl_transports(facts: Facts) -> Iterator[Finding]:
    """List what nccl may use in addition to TCP; it chooses by itself."""
    if not facts.cuda_devices:
        return
    count, known = len(facts.cuda_devices), []
    if facts.direct_pairs:
        pairs = count * (count - 1)
        known.append(f"direct (NVLink or PCIe) {facts.direct_pairs} of {pairs} pairs")
    if facts.network.infiniband:
        known.append(f"InfiniBand {', '.join(facts.network.infiniband)}")
    value = "; ".join(known) or "no InfiniBand, no direct access between devices"
    yield Finding("nccl transports", OK, f"{value}; TCP as NCCL_SOCKET_IFNAME says")


def route(facts: Facts) -> Iterator[Finding]:
    """Judge the way to the store, which every rank connects to."""
    name, network = "way to the store", facts.network
    if not network.master:
        value = "MASTER_ADDR is not set: torchrun sets it"
        yield Finding(name, OK, value)
    elif not network.route_address:
        value = f"none to MASTER_ADDR {network.master}"
        advice = "set MASTER_ADDR to a name or address that this machine can reach"
        yield Finding(name, MISSING, value, advice)
    else:
        link = choose(network.interfaces, route=network.route_address)
        value = f"{link.transport} to MASTER_ADDR {network.master}"
        if network.sealed:
            yield Finding(name, OK, f"{value}; runs have a secret")
        elif is_loopback(link.address):
            yield Finding(name, OK, value)
        else:
            advice = "who reaches its port controls the run: set PIPETRANSFORMER_SECRET"
            advice += " on every rank, or close the port to others (docs/protocol.md)"
            yield Finding(name, NOTE, f"{value}; no secret", advice)


def memory(facts: Facts) -> Iterator[Finding]:
    """Tell the memory; what the job may use is what slots and cache share."""
    name = "memory"
    if facts.memory is None or facts.memory_limit is None:
        yield Finding(name, NOTE, "not read", "mend the extension, which reads it")
        return
    value = _gib(facts.memory)
    if facts.memory_limit >= facts.memory:
        yield Finding(name, OK, f"{value}, no lower limit of a job or container")
        return
    value += f", this job may use {_gib(facts.memory_limit)}"
    yield Finding(name, OK, f"{value} (limit of {facts.memory_limited_by})")


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Judge /dev/shm; the activation cache does not use it, data loaders do."""
    name = "shared memory"
    user = "workers of a DataLoader pass batches through it"
    if facts.shared_memory is None:
        advice = f"mount it: {user}; the activation cache does not need it"
        yield Finding(name, NOTE, "no /dev/shm", advice)
        return
    size, free = facts.shared_memory
    value = f"/dev/shm {_gib(size)}, {_gib(free)} free"
    if free < _SMALL_SHARED_MEMORY:
        advice = f"make it larger (containers: --shm-size): {user}"
        yield Finding(name, NOTE, value, advice)
    else:
        yield Finding(name, OK, value)


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """Report the limit on locked memory, which network cards need for RDMA."""
    name, limit = "locked memory", facts.locked_memory
    if limit is None:
        yield Finding(name, OK, "no limit")
    elif facts.cuda_devices and limit < _GIB:
        advice = "if nccl is to use InfiniBand: ulimit -l unlimited"
        yield Finding(name, NOTE, f"at most {_gib(limit)}", advice)
    else:
        yield Finding(name, OK, f"at most {_gib(limit)}; nothing here locks memory")


def io_uring(facts: Facts) -> Iterator[Finding]:
    """Report whether the kernel takes io_uring calls from this process."""
    if facts.io_uring:
        value = f"not available: {facts.io_uring}; the disk tier reads without it"
        yield Finding("io_uring", OK, value)
    else:
        yield Finding(
            "io_uring", OK, "available: the disk tier of the cache reads by it"
        )


def extras(facts: Facts) -> Iterator[Finding]:
    """Report optional packages."""
    for extra, missing in facts.extras.items():
        name = f"extra {extra}"
        if missing:
            advice = f"in a checkout: pip install --no-build-isolation '.[{extra}]'"
            yield Finding(name, NOTE, f"missing: {', '.join(missing)}", advice)
        else:
            yield Finding(name, OK, "installed")


def _release(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor)


def _gib(size: int) -> str:
    if size < _GIB:
        return f"{size / _MIB:.0f} MiB"
    return f"{size / _GIB:.1f} GiB"
