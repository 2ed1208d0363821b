"""The interface is chosen from what the system says; nothing here opens a socket."""

import pytest

from pipetransformer.network import Interface, choose, links_of

HOST = {
    "lo": Interface("lo", ("127.0.0.1", "::1")),
    "eth0": Interface("eth0", ("10.0.0.5", "2001:db8::5")),
    "ib0": Interface("ib0", ("10.1.0.5",), infiniband=True),
}


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ({"route": "10.0.0.5"}, "TCP over eth0 10.0.0.5 (way to the store)"),
        ({"route": "2001:db8::5"}, "TCP over eth0 2001:db8::5 (way to the store)"),
        (
            {"route": "10.1.0.5"},
            "TCP over InfiniBand ib0 10.1.0.5 (way to the store)",
        ),
        ({"route": "10.9.9.9"}, "TCP over ? 10.9.9.9 (way to the store)"),
        ({"route": "127.0.0.1"}, "loopback lo 127.0.0.1 (way to the store)"),
        ({"route": "127.0.1.1"}, "loopback lo 127.0.1.1 (way to the store)"),
        (
            {"route": "127.0.0.1", "towards_peers": ["127.0.0.1", "10.0.0.5"]},
            "TCP over eth0 10.0.0.5 (way to the other ranks)",
        ),
        (
            {"route": "127.0.0.1", "towards_peers": ["", "127.0.0.1"]},
            "loopback lo 127.0.0.1 (way to the store)",
        ),
        (
            {"route": "10.1.0.5", "towards_peers": ["10.0.0.5"]},
            "TCP over InfiniBand ib0 10.1.0.5 (way to the store)",
        ),
        (
            {"route": "", "host_address": "10.0.0.5"},
            "TCP over eth0 10.0.0.5 (address of the hostname)",
        ),
        ({"route": ""}, "loopback lo 127.0.0.1 (no other way is known)"),
    ],
)
def test_the_way_to_the_store_counts_and_then_the_way_to_the_others(known, shown):
    assert str(choose(HOST, **known)) == shown


def test_loopback_works_where_no_interface_is_known():
    link = choose({}, route="127.0.0.1")
    assert (link.interface, link.address) == ("", "127.0.0.1")


def test_named_interfaces_are_taken_in_the_family_of_the_way():
    (link,) = links_of("eth0", HOST, what="interface", route="10.1.0.5")
    assert str(link) == "TCP over eth0 10.0.0.5 (interface names it)"
    (link,) = links_of("eth0", HOST, what="interface", route="2001:db8::9")
    assert link.address == "2001:db8::5"
    (link,) = links_of("ib0", HOST, what="interface", route="2001:db8::9")
    assert link.address == "10.1.0.5"
    several = links_of("ib0,lo", HOST, what="GLOO_SOCKET_IFNAME")
    assert [link.interface for link in several] == ["ib0", "lo"]


@pytest.mark.parametrize("wanted", ["foo", "eth0,foo"])
def test_a_wrong_name_lists_the_interfaces_there_are(wanted):
    with pytest.raises(
        ValueError, match=r"^interface: expected one of eth0, ib0, lo, got 'foo'$"
    ):
        links_of(wanted, HOST, what="interface")
