"""Finds the interface that this rank's groups take; asks the system, sends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed import distributed_c10d as c10d

from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.network import (
    Link,
    bindable_address,
    choose,
    is_loopback,
    links_of,
    list_interfaces,
    own_address_towards,
)

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


class LinkChoice:
    """This rank's links: named ones, or the one towards the store.

    Args:
        config: `interface` is used.
        environ: the environment; ``GLOO_SOCKET_IFNAME`` counts as torch's gloo
            counts it, where the config names nothing.

    Raises:
        ValueError: a name that no interface of this machine has.
    """

    def __init__(self, config: AutoDPConfig, environ: Mapping[str, str]) -> None:
        self._interfaces = list_interfaces()
        variable = environ.get(_GLOO_VARIABLE, "")
        self._wanted, self._what = (
            (config.interface, "interface")
            if config.interface is not None
            else (variable, _GLOO_VARIABLE)
        )
        self._route = ""
        self._links = self._named()

    def _named(self) -> tuple[Link, ...]:
        if not self._wanted:
            return ()
        return links_of(
            self._wanted, self._interfaces, what=self._what, route=self._route
        )

    def towards(self, host: str) -> str:
        """Choose by the way to the store's host.

        Args:
            host: name or address; empty: a store that has none.

        Returns:
            The address to tell the other ranks.
        """
        self._route = own_address_towards(host) if host else ""
        hostname = "" if self._route else bindable_address(socket.gethostname())
        self._links = self._named() or (
            choose(self._interfaces, route=self._route, host_address=hostname),
        )
        return self._links[0].address

    def settle(self, peers: Iterable[str]) -> tuple[Link, ...]:
        """Return the links, now that the other ranks' addresses are known.

        Where the store's name leads to the loopback, as on the machine that serves
        it, but a rank is elsewhere, the way to that rank counts.

        Args:
            peers: their addresses, read as far as needed.
        """
        if not self._wanted and is_loopback(self._links[0].address):
            beyond = next((peer for peer in peers if not is_loopback(peer)), "")
            if beyond:
                way = own_address_towards(beyond)
                self._links = (
                    choose(self._interfaces, route=self._route, towards_peers=[way]),
                )
        return self._links


def host_of(store: c10d.Store) -> str:
    """Return the host of a TCPStore, below any prefixes; empty for another kind."""
    found: Any = store
    while isinstance(found, c10d.PrefixStore):
        found = found.underlying_store
    return str(getattr(found, "host", ""))
