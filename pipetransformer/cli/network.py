"""What decides which network interface the ranks' connections take."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipetransformer.network import (
    Interface,
    bindable_address,
    list_interfaces,
    own_address_towards,
)

# As autodp names them; it needs torch, which may be what is missing.
SECRET_VARIABLES = ("PIPETRANSFORMER_SECRET", "PIPETRANSFORMER_SECRET_FILE")


@dataclass(frozen=True, kw_only=True)
class Network:
    """What decides where connections go.

    Args:
        wanted: ``GLOO_SOCKET_IFNAME``; empty if not set.
        hostname: of this machine.
        host_address: what the hostname resolves to and can be bound; empty: nothing.
        interfaces: those that have an address, by name.
        master: ``MASTER_ADDR``; empty if not set.
        route_address: this machine's address on the way to it; empty: no way.
        infiniband: devices with an active port, for nccl.
        sealed: whether the environment gives runs a secret.
    """

    wanted: str
    hostname: str
    host_address: str
    interfaces: Mapping[str, Interface]
    master: str
    route_address: str
    infiniband: tuple[str, ...] = ()
    sealed: bool = False


def look_up_network(environ: Mapping[str, str], root: Path = Path("/")) -> Network:
    """Ask the system, as a run does when it opens; nothing is sent.

    Args:
        environ: the environment.
        root: where ``proc`` and ``sys`` are.
    """
    master = environ.get("MASTER_ADDR", "")
    hostname = socket.gethostname()
    return Network(
        wanted=environ.get("GLOO_SOCKET_IFNAME", ""),
        hostname=hostname,
        host_address=bindable_address(hostname),
        interfaces=list_interfaces(root),
        master=master,
        route_address=own_address_towards(master) if master else "",
        infiniband=_infiniband_devices(root),
        sealed=any(environ.get(name) for name in SECRET_VARIABLES),
    )


def _infiniband_devices(root: Path) -> tuple[str, ...]:
    found = set()
    for state in (root / "sys/class/infiniband").glob("*/ports/*/state"):
        try:
            if "ACTIVE" in state.read_text():
                found.add(state.parents[2].name)
        except OSError:
            continue
    return tuple(sorted(found))
