"""Which interface a rank's groups take: pure, from what the system said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipetransformer.network.interfaces import Interface, is_loopback


@dataclass(frozen=True)
class Link:
    """An address that groups listen at, and how it was chosen.

    Args:
        interface: its interface; empty if none is known to have it.
        address: numeric.
        infiniband: whether the interface carries IP over InfiniBand.
        reason: why this one.
    """

    interface: str
    address: str
    infiniband: bool
    reason: str

    def __str__(self) -> str:
        """Return for example ``TCP over eth0 10.0.0.5 (way to the store)``."""
        return f"{self.transport} ({self.reason})"

    @property
    def transport(self) -> str:
        """For example ``TCP over eth0 10.0.0.5``."""
        name = self.interface or "?"
        if is_loopback(self.address):
            return f"loopback {name} {self.address}"
        kind = "TCP over InfiniBand" if self.infiniband else "TCP over"
        return f"{kind} {name} {self.address}"


def links_of(
    wanted: str, interfaces: Mapping[str, Interface], *, what: str, route: str = ""
) -> tuple[Link, ...]:
    """Return the links of interfaces that were named.

    Args:
        wanted: one name, or several separated by commas.
        interfaces: from `list_interfaces`.
        what: who named them, for texts.
        route: own address on the way to the store: its family is preferred.

    Raises:
        ValueError: a name that no interface with an address has.
    """
    links = []
    for name in wanted.split(","):
        if name not in interfaces:
            raise ValueError(
                f"{what}: expected one of {', '.join(sorted(interfaces))}, got {name!r}"
            )
        interface = interfaces[name]
        alike = [a for a in interface.addresses if (":" in a) == (":" in route)]
        address = (alike or interface.addresses)[0]
        links.append(Link(name, address, interface.infiniband, f"{what} names it"))
    return tuple(links)


def choose(
    interfaces: Mapping[str, Interface],
    *,
    route: str,
    towards_peers: Sequence[str] = (),
    host_address: str = "",
) -> Link:
    """Choose when nobody named an interface.

    Args:
        interfaces: from `list_interfaces`.
        route: own address on the way to the store; empty: not known.
        towards_peers: own addresses on the ways to ranks elsewhere. They count only
            where the store is on this machine: its name may lead to the loopback.
        host_address: what the hostname resolves to, for a store without a host.
    """
    beyond = next((a for a in towards_peers if a and not is_loopback(a)), "")
    if route and not (is_loopback(route) and beyond):
        return _link(interfaces, route, "way to the store")
    if beyond:
        return _link(interfaces, beyond, "way to the other ranks")
    if host_address:
        return _link(interfaces, host_address, "address of the hostname")
    return _link(interfaces, "127.0.0.1", "no other way is known")


def _link(interfaces: Mapping[str, Interface], address: str, reason: str) -> Link:
    for interface in interfaces.values():
        if address in interface.addresses:
            return Link(interface.name, address, interface.infiniband, reason)
    # All of 127.0.0.0/8 is the loopback interface's.
    name = "lo" if is_loopback(address) and "lo" in interfaces else ""
    return Link(name, address, False, reason)
