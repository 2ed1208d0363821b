"""What the system is asked: interfaces, the way to a host, bindable addresses."""

import socket

import pytest

from pipetransformer.network import (
    bindable_address,
    interfaces,
    is_loopback,
    list_interfaces,
    own_address_towards,
    route,
)


def test_interfaces_have_addresses_and_kinds(tmp_path, monkeypatch):
    known = {"lo": ("127.0.0.1",), "ib0": (), "down0": ()}
    names = list(enumerate(known, start=1))
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: names)
    monkeypatch.setattr(interfaces, "_ipv4_addresses", lambda probe, name: known[name])
    (tmp_path / "proc/net").mkdir(parents=True)
    lines = [
        "00000000000000000000000000000001 01 80 10 80       lo",
        "20010db8000000000000000000000005 02 40 00 80      ib0",
        "fe800000000000000000000000000005 02 40 20 80      ib0",
        "fe800000000000000000000000000006 03 40 20 80    down0",
    ]
    (tmp_path / "proc/net/if_inet6").write_text("\n".join(lines) + "\n")
    for name, kind in (("lo", "772"), ("ib0", "32")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "type").write_text(f"{kind}\n")
    found = list_interfaces(tmp_path)
    assert list(found) == ["lo", "ib0"]
    assert found["lo"].addresses == ("127.0.0.1", "::1") and found["lo"].loopback
    assert found["ib0"].addresses == ("2001:db8::5",)
    assert found["ib0"].infiniband and not found["ib0"].loopback


def test_this_machine_can_be_asked():
    for name, interface in list_interfaces().items():
        assert interface.name == name and interface.addresses
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert is_loopback("127.0.1.1") and is_loopback("::1")
    assert not is_loopback("10.0.0.5")


def resolved(*addresses):
    """Stand in for the resolver, which a container may not have."""

    def getaddrinfo(host, port, *, type):
        if not addresses:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, type, 0, "", (a, port or 0)) for a in addresses]

    return getaddrinfo


def test_a_name_without_an_address_has_no_way(monkeypatch):
    monkeypatch.setattr(route.socket, "getaddrinfo", resolved())
    assert own_address_towards("nowhere") == "" and bindable_address("nowhere") == ""


@pytest.mark.parametrize("name", ["a" * 70 + ".b", "\u00e4..b", "."])
def test_what_cannot_be_a_name_has_no_way(name):
    assert own_address_towards(name) == "" and bindable_address(name) == ""


def test_an_address_of_the_hostname_must_be_bindable(monkeypatch):
    # 192.0.2.0/24 is nobody's.
    monkeypatch.setattr(
        route.socket, "getaddrinfo", resolved("192.0.2.200", "127.0.0.1")
    )
    assert bindable_address("node0") == "127.0.0.1"
