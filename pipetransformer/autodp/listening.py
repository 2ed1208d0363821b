"""Where the rank that serves the store listens: at the address the ranks use."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator

from pipetransformer.network import is_loopback

logger = logging.getLogger(__name__)

_BACKLOG = 4096


def listening_socket(host: str, port: int, *, one_node: bool) -> socket.socket | None:
    """Bind a store's port at the address that `host` stands for.

    Args:
        host: Name or address by which the ranks reach the store.
        port: 1 to 65535.
        one_node: Whether all ranks are known to be on this machine.

    Returns:
        A listening socket, bound to one address. None where this machine cannot tell
        at which of its addresses others reach it: `host` is none of them (a service's
        name, an address before a router), or leads to the loopback here and may lead
        elsewhere on other nodes.

    Raises:
        OSError: `host` is unknown, or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # Clients try every address; IPv4 first, as the groups' sockets.
    for family, *_, address in sorted(found, key=lambda f: f[0] != socket.AF_INET):
        if is_loopback(str(address[0])) and not (one_node or _means_loopback(host)):
            continue
        with contextlib.ExitStack() as closing:
            listening = closing.enter_context(socket.socket(family))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
                text = f"{os.strerror(error.errno or 0)}: {host}:{port}"
                raise OSError(error.errno, text) from None
            listening.listen(_BACKLOG)
            closing.pop_all()
            return listening
    return None


def _means_loopback(host: str) -> bool:
    """Tell whether a name leads to the loopback on every machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def handing_over(listening: socket.socket) -> Iterator[int]:
    """Give a socket's descriptor to the body, which keeps it unless it raises.

    Who got it may have closed it before it failed, and the number may be another
    file's by then: only the socket itself is closed.
    """
    mine = os.fstat(listening.fileno())
    descriptor = listening.detach()
    try:
        yield descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            now = os.fstat(descriptor)
            if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
                os.close(descriptor)
        raise
