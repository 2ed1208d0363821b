"""Where groups listen, and that runs on one store do not see each other."""

import ipaddress
import os
import re
import socket
import struct
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autodp import (
    AutoDPConfig,
    ControlPlane,
    GroupCache,
    PeerFailure,
    build_group,
    connect,
    links,
)
from pipetransformer.network import Interface, is_loopback, list_interfaces
from tests.autodp.world import FAST, run_scenarios


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interface": ""}, "interface: expected a name or None, got ''"),
        ({"cached_groups": -1}, "cached_groups: expected a number from 0, got -1"),
        ({"run_name": "a/b"}, "run_name: expected at most 64 letters, .* got 'a/b'"),
        ({"run_name": "x" * 65}, "run_name: expected at most 64 letters"),
        ({"run_name": None}, "run_name: expected at most 64 letters, .* got None"),
        ({"run_name": 7}, "run_name: expected a str, got 7"),
        ({"interface": b"eth0"}, "interface: expected a str, got b'eth0'"),
        ({"cached_groups": 1.5}, "cached_groups: expected an int, got 1.5"),
        (
            {"transfer_bucket_bytes": 2**70},
            r"transfer_bucket_bytes: expected a number from 1 to 2\*\*32, got 118059",
        ),
        (
            {"heartbeat_interval": timedelta(microseconds=1)},
            "heartbeat_interval: expected at least a millisecond, got 0:00:00.000001",
        ),
        ({"group_timeout": timedelta.max}, "group_timeout: expected at most a year"),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        AutoDPConfig(**changes)


def test_a_wrong_interface_lists_those_there_are():
    known = ", ".join(sorted(list_interfaces()))
    message = f"interface: expected one of {known}, got 'no-such-if'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        connect(replace(FAST, interface="no-such-if"))


def test_a_wrong_interface_of_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-if")
    with pytest.raises(ValueError, match="^GLOO_SOCKET_IFNAME: expected one of"):
        connect(FAST)


def test_the_machine_of_the_store_takes_the_way_to_a_rank_elsewhere(monkeypatch):
    ways = {"node0": "127.0.0.1", "10.0.0.6": "10.0.0.5"}
    known = {
        "lo": Interface("lo", ("127.0.0.1",)),
        "eth0": Interface("eth0", ("10.0.0.5",)),
    }
    monkeypatch.setattr(links, "own_address_towards", ways.__getitem__)
    monkeypatch.setattr(links, "list_interfaces", lambda: known)

    def settled(peers, config=FAST):
        choice = links.LinkChoice(config, {})
        told = choice.towards("node0")
        return told, [str(link) for link in choice.settle(iter(peers))]

    here, elsewhere = "loopback lo 127.0.0.1", "TCP over eth0 10.0.0.5"
    assert settled(["127.0.0.1"]) == ("127.0.0.1", [f"{here} (way to the store)"])
    told, found = settled(["127.0.0.1", "10.0.0.6"])
    assert (told, found) == ("127.0.0.1", [f"{elsewhere} (way to the other ranks)"])
    # A name that was given stays.
    told, found = settled(["10.0.0.6"], replace(FAST, interface="lo"))
    assert (told, found) == ("127.0.0.1", [f"{here} (interface names it)"])


def test_a_world_of_one_listens_nowhere():
    before = listening()
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    group = build_group(plane, name="g/0", members=[0])
    group.barrier()
    assert listening() == before
    assert info.links == () and info.transport == "no network"
    group.retire()
    plane.finish()


def listening():
    """Addresses at which this process listens, ascending, from /proc."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed meanwhile
        own.update(re.findall(r"^socket:\[(\d+)\]$", target))
    found = []
    for name in ("tcp", "tcp6"):
        path = f"/proc/self/net/{name}"
        if not os.path.exists(path):
            continue
        with open(path) as table:
            for line in list(table)[1:]:
                local, state, inode = (line.split()[i] for i in (1, 3, 9))
                if state == "0A" and inode in own:
                    found.append(_address(local.partition(":")[0]))
    return sorted(found)


def _address(digits):
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return str(ipaddress.ip_address(socket.inet_ntop(family, raw)))


def _groups_listen_at_the_link(plane):
    (link,) = plane.info.links
    before = listening()
    group = build_group(plane, name="g/0", members=range(plane.world_size))
    group.barrier()
    more = list(listening())
    for address in before:
        more.remove(address)
    group.retire()
    return str(link), link.address, more, len(before), plane.info.store_rank


def _named_runs(plane):
    """Two runs at once over the store of the plane's run, joined in opposite order."""
    joined = {}

    def join(name):
        config = replace(FAST, run_name=name)
        joined[name] = connect(config), config

    names = ["one", "two"] if plane.rank % 2 else ["two", "one"]
    threads = [threading.Thread(target=join, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
        thread.join(0.3)  # the first one, too, waits for its peers
    for thread in threads:
        thread.join(60)
    planes = {
        name: ControlPlane(store, info, config)
        for name, ((info, store), config) in joined.items()
    }
    sums = {}
    for name, value in (("one", 1.0), ("two", 10.0)):
        mine = planes[name]
        assert mine.gather("name", name.encode(), phase="test") == [
            name.encode()
        ] * len(range(mine.world_size))
        group = build_group(mine, name="g/0", members=range(mine.world_size))
        sums[name] = group.all_reduce_(torch.tensor([value])).item()
        group.retire()
    planes["one"].fail("user code", "one ends")
    with pytest.raises(PeerFailure, match="one ends"):
        while True:
            planes["one"].wait_any([["never"]])
    planes["one"].close()
    planes["two"].gather("still there", b"", phase="test")
    assert planes["two"].failure is None
    planes["two"].finish()
    return sums, [planes[name].info.run_id for name in ("one", "two")]


def _group_is_used_again(plane):
    """Two layouts in turn, a model on each; the sums show whose order is in use."""
    cache = GroupCache(
        4,
        lambda name, m: build_group(plane, name=name, members=m),
        lambda: plane.generation,
    )
    live, used = None, []
    for epoch, members in enumerate([(0, 1), (1, 0)] * 3, start=1):
        fresh = f"g/{epoch}"
        group = cache.obtain(cache.name_for(members, fresh), members, fresh)
        cache.take(group)
        if live is not None:
            cache.keep(live)
        live = group
        wrapped = DistributedDataParallel(
            nn.Linear(2, 1), process_group=group.process_group, init_sync=False
        )
        wrapped(torch.full((1, 2), float(plane.rank))).sum().backward()
        assert wrapped.module.weight.grad.tolist() == [[0.5, 0.5]]
        del wrapped
        used.append(group.name)
        assert group.broadcast_(torch.tensor([plane.rank]), 0).item() == members[0]
    deadline = time.monotonic() + 40  # groups of tests before this one are going
    while (listens := len(listening())) > 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    live.retire()
    cache.drop()
    return used, cache.built, cache.reused, listens


@pytest.fixture(scope="module")
def results_of():
    return run_scenarios(
        [_groups_listen_at_the_link, _named_runs, _group_is_used_again], 2
    )


@pytest.mark.distributed
def test_groups_listen_at_the_chosen_address_alone(results_of):
    for shown, address, more, before, store_rank in results_of(
        _groups_listen_at_the_link
    ):
        # The tests' store is at 127.0.0.1.
        assert is_loopback(address) and shown.endswith("(way to the store)")
        assert more == [address]
        assert before <= 1 and store_rank == 0


@pytest.mark.distributed
def test_runs_of_different_names_do_not_see_each_other(results_of):
    (sums, ids), (other_sums, other_ids) = results_of(_named_runs)
    assert sums == other_sums == {"one": 2.0, "two": 20.0}
    assert ids == other_ids and len(set(ids)) == 2


@pytest.mark.distributed
def test_a_group_is_used_again_by_new_models(results_of):
    for used, built, reused, listens in results_of(_group_is_used_again):
        assert used == used[:2] * 3 and len(set(used)) == 2
        assert (built, reused) == (2, 4)
        assert listens <= 3  # two groups, and the store where it is served
