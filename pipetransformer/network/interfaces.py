"""The network interfaces of this machine that have an address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915
_INFINIBAND = 32  # ARPHRD_INFINIBAND, in the interface's ``type``
_GLOBAL_SCOPE, _HOST_SCOPE = 0x00, 0x10


@dataclass(frozen=True)
class Interface:
    """One interface.

    Args:
        name: such as ``"eth0"``.
        addresses: its own addresses, IPv4 first; link-local ones are left out.
        infiniband: whether it carries IP over InfiniBand.
    """

    name: str
    addresses: tuple[str, ...]
    infiniband: bool = False

    @property
    def loopback(self) -> bool:
        """Whether it reaches this machine only."""
        return all(is_loopback(address) for address in self.addresses)


def is_loopback(address: str) -> bool:
    """Tell whether an address never leaves the machine."""
    return address.startswith("127.") or address == "::1"


def list_interfaces(root: Path = Path("/")) -> Mapping[str, Interface]:
    """Ask the kernel for the interfaces that have an address, by name.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    later = _ipv6_addresses(root)
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            addresses = (*_ipv4_addresses(probe, name), *later.get(name, ()))
            if addresses:
                found[name] = Interface(name, addresses, _is_infiniband(root, name))
    return found


def _ipv4_addresses(probe: socket.socket, name: str) -> tuple[str, ...]:
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _ipv6_addresses(root: Path) -> dict[str, tuple[str, ...]]:
    """Read /proc/net/if_inet6: address, index, prefix, scope, flags, name."""
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if int(scope, 16) in (_GLOBAL_SCOPE, _HOST_SCOPE):
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            found[name] = (*found.get(name, ()), address)
    return found


def _is_infiniband(root: Path, name: str) -> bool:
    try:
        return int((root / "sys/class/net" / name / "type").read_text()) == _INFINIBAND
    except (OSError, ValueError):
        return False
