"""Which network interface the ranks' connections take, and why; nothing is sent."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915
_DEFAULT_PORT = 29500  # torchrun's; a UDP socket only asks the kernel for the route


@dataclass(frozen=True, kw_only=True)
class Network:
    """What decides where connections go.

    Args:
        wanted: ``GLOO_SOCKET_IFNAME``, which torch's gloo obeys; empty if not set.
        hostname: of this machine.
        host_address: what the hostname resolves to and can be bound; empty: nothing.
        interfaces: IPv4 address of each interface that has one.
        master: ``MASTER_ADDR``; empty if not set.
        route_address: this machine's address on the way to it; empty: no way.
    """

    wanted: str
    hostname: str
    host_address: str
    interfaces: Mapping[str, str]
    master: str
    route_address: str

    def interface_of(self, address: str) -> str:
        """Return the interface with an address; empty if none has it."""
        for name, own in self.interfaces.items():
            if own == address:
                return name
        # All of 127.0.0.0/8 is the loopback interface's.
        return "lo" if is_loopback(address) else ""


def is_loopback(address: str) -> bool:
    """Tell whether an address never leaves the machine."""
    return address.startswith("127.") or address == "::1"


def look_up_network(environ: Mapping[str, str]) -> Network:
    """Ask the system, as torch's gloo does when a group is built.

    Gloo takes the interface named by ``GLOO_SOCKET_IFNAME``, else the first address
    of the hostname that can be bound, else the loopback.
    """
    master = environ.get("MASTER_ADDR", "")
    hostname = socket.gethostname()
    return Network(
        wanted=environ.get("GLOO_SOCKET_IFNAME", ""),
        hostname=hostname,
        host_address=_bindable_address(hostname),
        interfaces=_interfaces(),
        master=master,
        route_address=_route(master) if master else "",
    )


def _bindable_address(hostname: str) -> str:
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return ""


def _interfaces() -> dict[str, str]:
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _route(master: str) -> str:
    try:
        found = socket.getaddrinfo(master, _DEFAULT_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
