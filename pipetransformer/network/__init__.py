"""Room ``network``: which interface a rank's connections take; imports no torch."""

from pipetransformer.network.choice import Link, choose, links_of
from pipetransformer.network.interfaces import Interface, is_loopback, list_interfaces
from pipetransformer.network.route import bindable_address, own_address_towards

__all__ = [
    "Interface",
    "Link",
    "bindable_address",
    "choose",
    "is_loopback",
    "links_of",
    "list_interfaces",
    "own_address_towards",
]
