"""Asks the system for the way to a peer; nothing is sent."""

from __future__ import annotations

import socket

_ANY_PORT = 29500  # a UDP socket only asks the kernel for the route


def own_address_towards(host: str) -> str:
    """Return this machine's address on the way to `host`; empty: no way.

    Looks the name up, so it takes as long as the resolver does.
    """
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: it cannot be a name
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def bindable_address(hostname: str) -> str:
    """Return the first address of this machine's name that can be bound; or empty.

    It is the one that gloo takes when it receives no name.
    """
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return ""
