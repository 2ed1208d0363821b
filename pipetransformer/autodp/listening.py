"""Where the rank that serves the store listens: at the address the ranks use."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Iterator

from pipetransformer.network import is_loopback

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_EVERYWHERE = ("0.0.0.0", "::")
_OWN_FILES = "/proc/self/fd"


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
        elsewhere on other nodes; or it means every interface (``0.0.0.0``, ``::``).

    Raises:
        OSError: `host` is unknown, or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if any(str(address[0]) in _EVERYWHERE for *_, address in found):
        return None
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


def listens_itself(port: int) -> bool:
    """Tell whether this process listens at a port; False where that cannot be told."""
    with contextlib.suppress(FileNotFoundError):
        return any(_port_of(int(name)) == port for name in os.listdir(_OWN_FILES))
    return False


def _port_of(descriptor: int) -> int | None:
    """Return the port that a file of this process listens at, None if it does not."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        mine = os.dup(descriptor)
        closing.callback(os.close, mine)
        with socket.socket(fileno=mine) as each:
            closing.pop_all()
            network = each.family in (socket.AF_INET, socket.AF_INET6)
            if network and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return int(each.getsockname()[1])
    return None


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
