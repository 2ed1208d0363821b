"""``pipetransformer cluster``: measures the machines and writes the cluster file."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipetransformer.cli import drawing, files, output
from pipetransformer.cli.arguments import Subparsers, add_command, count, file_name

if TYPE_CHECKING:
    from rich.table import Table

    from pipetransformer.planner import CacheTiers, Cluster

_NANOSECONDS = 1e9
_SMALL, _LARGE = 1 << 10, 16 << 20  # bytes of a transfer
_REPEATS = 5  # the median counts
_TIMEOUT = timedelta(seconds=60)
_ALLOCATED = 0.95  # of an accelerator's memory; the rest are gaps between blocks
_CONTEXT_BYTES = 1 << 30  # of a process on an accelerator
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SAMPLES, _ROWS = 4096, 64  # of the small cache that is measured


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "cluster",
        run,
        summary="measure the machines that plans are made for",
        description="Looks at devices, cores and memory, measures links between "
        "processes, devices and nodes (--links, under torchrun) and the tiers of the "
        "activation cache (--tiers), and writes the cluster to FILE. What is not "
        "measured is assumed, and said to be.",
        examples="""
            pipetransformer cluster --tiers --output cluster.json
            pipetransformer cluster --slots 4 --tiers --disk /scratch --json
            torchrun --nproc-per-node 2 -m pipetransformer cluster --links --tiers
        """,
    )
    add = parser.add_argument
    add(
        "--links",
        action="store_true",
        help="measure links; needs torchrun, with two processes of a node or one on "
        "each of two nodes, or two devices",
    )
    add("--tiers", action="store_true", help="measure the activation cache")
    add(
        "--record-bytes",
        type=count,
        default=300_000,
        metavar="N",
        help="of a sample's activations; default 300000",
    )
    add("--disk", metavar="DIR", help="where the cache would keep records on disk")
    add(
        "--slots",
        type=count,
        help="pipeline slots of a node without devices; default the processes that "
        "torchrun starts there, else its cores",
    )
    add("--output", type=file_name, metavar="FILE", help="where it is written")


@dataclasses.dataclass(frozen=True)
class _Place:
    """This process among those that torchrun has started."""

    rank: int = 0
    world: int = 1
    local_world: int = 1

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> _Place:
        if "RANK" not in environ:
            return cls()
        names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
        try:
            place = cls(*(int(environ[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{', '.join(names)}: expected what torchrun sets, got {error}"
            ) from None
        if not 0 <= place.rank < place.world or place.world % place.local_world:
            raise ValueError(
                f"ranks: expected nodes of equally many, got rank {place.rank} of "
                f"{place.world} with {place.local_world} a node"
            )
        return place

    @property
    def num_nodes(self) -> int:
        return self.world // self.local_world


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; on the first process alone."""
    if arguments.disk is not None and not arguments.tiers:
        raise ValueError("--disk: expected --tiers, too, got it alone")
    place = _Place.read(os.environ)
    as_json = arguments.json or arguments.output == files.STANDARD_STREAM
    console = None if as_json or place.rank else output.console()
    cluster, measured = _measure(arguments, place)
    if place.rank:
        return output.OK
    if arguments.output not in (None, files.STANDARD_STREAM):
        files.write_text(arguments.output, cluster.to_json())
    if console is None:
        files.write_text(files.STANDARD_STREAM, cluster.to_json())
        return output.OK
    drawing.print_table(console, _table(cluster, measured))
    if arguments.output is not None:
        console.print(f"written to {arguments.output}", soft_wrap=True)
    return output.OK


def _measure(
    arguments: argparse.Namespace, place: _Place
) -> tuple[Cluster, dict[str, Any]]:
    """Return the cluster, and which of its fields were measured."""
    import torch

    from pipetransformer.planner import Cluster

    devices = torch.cuda.device_count()
    found = _devices(devices) if devices else _slots(arguments.slots, place)
    measured: dict[str, Any] = {}
    if arguments.links:
        try:
            measured = _links(place, devices)
        except RuntimeError as error:  # of the store, of groups, of devices
            told = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ValueError(
                f"--links: expected processes and devices that reach each other, got "
                f"{told}"
            ) from error
    tiers = None
    if arguments.tiers and place.rank == 0:
        tiers = _tiers(arguments.record_bytes, arguments.disk)
        measured["cache"] = tiers
    fields = {**found, **measured}
    return Cluster(num_nodes=place.num_nodes, **fields), measured


def _devices(count: int) -> dict[str, Any]:
    import torch

    try:
        memory = min(
            int(torch.cuda.get_device_properties(index).total_memory)
            for index in range(count)
        )
    except RuntimeError as error:  # of the driver, or a device that is broken or taken
        raise ValueError(
            "devices: expected those that can be used, got "
            f"{str(error).partition(chr(10))[0]}; leave devices out with "
            "CUDA_VISIBLE_DEVICES"
        ) from error
    return {
        "devices_per_node": count,
        "device_memory_bytes": int(memory * _ALLOCATED),
        "context_bytes": _CONTEXT_BYTES,
    }


def _slots(wanted: int | None, place: _Place) -> dict[str, Any]:
    from pipetransformer import planner
    from pipetransformer._extension import host_memory, usable_cores

    cores = usable_cores()
    slots = wanted or (place.local_world if place.world > 1 else max(1, int(cores)))
    return {
        "devices_per_node": slots,
        "device_memory_bytes": host_memory().limit_bytes // slots,
        "cores_permille": 0 if cores >= slots else max(1000, int(1000 * cores)),
        "replica_link_bytes_per_s": planner.HOST_LINK_BYTES_PER_S,
        "replica_link_latency_ns": planner.HOST_ROUND_NS,
        "step_ns": planner.HOST_STEP_NS,
    }


# -- links ---------------------------------------------------------------------


def _links(place: _Place, devices: int) -> dict[str, Any]:
    """Measure what there is two of: processes of a node, devices, nodes; collective."""
    if place.world == 1 and devices < 2:
        raise ValueError(
            "--links: expected two processes or devices, got one; start it under "
            "torchrun"
        )
    found: dict[str, Any] = {}
    if place.world > 1:
        with _connected():
            if place.local_world > 1 and not devices:
                latency, rate = _all_reduce(place, (0, 1), device=None)
                found["replica_link_bytes_per_s"] = rate
                found["replica_link_latency_ns"] = latency // 2  # of two rounds
            if place.num_nodes > 1:
                latency, rate = _all_reduce(
                    place, (0, place.local_world), device=0 if devices else None
                )
                found["network_bytes_per_s"] = rate
                found["network_latency_ns"] = latency // 2  # of two messages
    if devices > 1 and place.rank == 0:
        latency, rate = _device_copies()
        found["device_link_bytes_per_s"] = rate
        found["device_link_latency_ns"] = latency
    if not found and place.rank == 0:
        raise ValueError(
            f"--links: expected two devices or nodes, got {devices} device on one node"
        )
    return found


@contextmanager
def _connected() -> Iterator[None]:
    import torch.distributed as dist

    _take_interface_of_runs()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield
        dist.barrier()  # nobody leaves while others measure
    finally:
        dist.destroy_process_group()


def _take_interface_of_runs() -> None:
    """Let gloo take the way to the store, as runs do, unless the user names another.

    By itself it takes the address that the machine's name has.
    """
    from pipetransformer.network import (
        choose,
        is_loopback,
        list_interfaces,
        own_address_towards,
    )

    host = os.environ.get("MASTER_ADDR", "")
    if not host or os.environ.get(_INTERFACE):
        return
    link = choose(list_interfaces(), route=own_address_towards(host))
    if link.interface and not is_loopback(link.address):
        os.environ[_INTERFACE] = link.interface


def _all_reduce(
    place: _Place, ranks: tuple[int, int], *, device: int | None
) -> tuple[int, int]:
    """Time sums of two ranks; return latency in ns and bytes per second on all."""
    import torch
    import torch.distributed as dist

    # Every rank takes part in making a group.
    backend = "nccl" if device is not None and dist.is_nccl_available() else "gloo"
    group = dist.new_group(list(ranks), backend=backend, timeout=_TIMEOUT)
    told = torch.zeros(2, dtype=torch.int64)
    if place.rank in ranks:
        where = torch.device("cpu" if device is None else f"cuda:{device}")

        def seconds(size: int) -> float:
            values = torch.zeros(size // 4, device=where)

            def once() -> None:
                dist.all_reduce(values, group=group)
                if device is not None:
                    torch.cuda.synchronize(where)

            return _median(once)

        told = torch.tensor(_line(seconds(_SMALL), seconds(_LARGE)))
    dist.broadcast(told, src=0)
    latency, rate = told.tolist()
    return latency, rate


def _device_copies() -> tuple[int, int]:
    import torch

    def seconds(size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
        target = torch.zeros(size, dtype=torch.uint8, device="cuda:1")

        def once() -> None:
            target.copy_(source)
            torch.cuda.synchronize(1)

        return _median(once)

    latency, rate = _line(seconds(_SMALL), seconds(_LARGE))
    return latency, rate


def _median(once: Callable[[], None]) -> float:
    once()  # connections are made at the first use
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return sorted(times)[_REPEATS // 2]


def _line(small: float, large: float) -> tuple[int, int]:
    """Return latency and rate of transfers that take so many seconds."""
    return (
        round(small * _NANOSECONDS),
        max(1, round((_LARGE - _SMALL) / max(large - small, 1e-9))),
    )


# -- tiers ---------------------------------------------------------------------


def _tiers(record_bytes: int, disk: str | None) -> CacheTiers:
    from pipetransformer._extension import host_memory
    from pipetransformer.autocache import measure_disk_rates, measure_rates
    from pipetransformer.planner import CacheTiers

    host = measure_rates(record_bytes, rows=_ROWS, num_samples=_SAMPLES)
    if host is None:
        raise ValueError("--tiers: expected memory for a small cache, got none")
    tiers = CacheTiers(
        host_bytes=host_memory().available_bytes // 4,
        host_bytes_per_s=host.bytes_per_s,
        host_record_ns=host.record_ns,
        host_in_line=True,
    )
    if disk is None:
        return tiers
    below = measure_disk_rates(record_bytes, disk, num_samples=_SAMPLES)
    if below is None:
        raise ValueError(f"--disk: expected a folder on a working disk, got {disk}")
    return dataclasses.replace(
        tiers,
        disk_bytes=shutil.disk_usage(disk).free // 2,
        disk_bytes_per_s=below.bytes_per_s,
    )


# -- output --------------------------------------------------------------------


def _table(cluster: Cluster, measured: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("field")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("")
    read = {"num_nodes", "devices_per_node", "device_memory_bytes", "cores_permille"}
    for name, value in dataclasses.asdict(cluster).items():
        if name == "cache":
            continue
        origin = "measured" if name in measured else "assumed"
        table.add_row(name, _shown(value), "" if name in read else origin)
    tiers = {} if cluster.cache is None else cluster.cache.to_dict()
    for name, value in tiers.items():
        is_rate = name.startswith(("host_bytes_per", "host_record", "disk_bytes_per"))
        origin = "measured" if is_rate and value else ""  # 0: there is no such tier
        table.add_row(f"cache {name}", _shown(value), origin)
    if cluster.cache is None:
        table.add_row("cache", "without limits", "assumed")
    return table


def _shown(value: object) -> str:
    if value is None:
        return "free"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return str(value)
