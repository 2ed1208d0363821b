"""The store listens where the ranks reach it, and nowhere else."""

import gc
import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from pipetransformer.autodp import PeerFailure, connect, launch, listening
from pipetransformer.autodp.listening import handing_over, listening_socket
from pipetransformer.network import list_interfaces
from tests.autodp.adversary import listening_ports
from tests.autodp.world import FAST, joined
from tests.support.ranks import free_port, run_ranks

OWN = [
    address
    for interface in list_interfaces().values()
    for address in interface.addresses
    if not interface.loopback and ":" not in address
]


def addresses_of(port):
    """Return the addresses at which something listens on a port."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{table}") as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                address, _, number = fields[1].partition(":")
                if fields[3] != "0A" or int(number, 16) != port:
                    continue
                data = bytes.fromhex(address)
                words = [data[i : i + 4][::-1] for i in range(0, len(data), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def _listens(rank, host):
    os.environ["MASTER_ADDR"] = host
    port = int(os.environ["MASTER_PORT"])
    with joined() as plane:
        if rank == 0:
            plane.publish("looked", repr(sorted(addresses_of(port))).encode())
        looked = plane.wait("looked", phase="looking").decode()
        return looked, port in listening_ports([os.getpid()])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), *((a, a) for a in OWN)],
)
def test_rank_0_listens_at_the_address_of_its_name_alone(host, expected):
    (first, serves), (second, other_serves) = run_ranks(_listens, 2, host)
    assert first == second == repr([expected])
    assert serves and not other_serves


def resolved_to(monkeypatch, *addresses):
    found = [
        (socket.AF_INET6 if ":" in a else socket.AF_INET, 1, 6, "", (a, 0))
        for a in addresses
    ]
    monkeypatch.setattr(listening.socket, "getaddrinfo", lambda *_, **__: found)


def listens_at(host, *, one_node):
    found = listening_socket(host, 0, one_node=one_node)
    if found is None:
        return None
    with found:
        return found.getsockname()[0]


@pytest.mark.parametrize(
    ("host", "addresses", "one_node", "expected"),
    [
        # As Debian lets a machine's own name lead to itself, and to nobody else.
        ("node0", ["127.0.1.1"], False, None),
        ("node0", ["127.0.1.1"], True, "127.0.1.1"),
        ("localhost", ["::1", "127.0.0.1"], False, "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], False, "127.0.0.1"),
        ("service", ["192.0.2.1"], False, None),  # no machine has this address
        ("service", ["192.0.2.1", "127.0.0.1"], True, "127.0.0.1"),
        ("0.0.0.0", ["0.0.0.0"], True, None),  # every interface, and so it is said
        ("::", ["::"], False, None),
        ("anywhere", ["127.0.0.1", "::"], True, None),
    ],
)
def test_an_address_that_others_may_not_reach_is_none_to_listen_at(
    monkeypatch, host, addresses, one_node, expected
):
    resolved_to(monkeypatch, *addresses)
    assert listens_at(host, one_node=one_node) == expected


def test_where_that_cannot_be_told_it_listens_everywhere_and_warns(monkeypatch, caplog):
    # The address of a router's outside: ranks reach the store, it is not ours.
    monkeypatch.setattr(launch, "listening_socket", lambda *_, **__: None)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    port = free_port()
    place = launch._read_place({"RANK": "0", "WORLD_SIZE": "2"})
    store = launch._serve(port, timedelta(seconds=20), place)
    assert store.port == port
    assert addresses_of(port) & {"0.0.0.0", "::"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the store listens on every interface of this machine")
    assert f"port {port}" in line


def test_it_warns_of_a_port_once_however_often_it_tries(monkeypatch, caplog):
    monkeypatch.setenv("MASTER_ADDR", "0.0.0.0")
    place = launch._read_place({"RANK": "0", "WORLD_SIZE": "2"})
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for _ in range(3):
            with pytest.raises(RuntimeError, match="(?i)address already in use"):
                launch._serve(port, timedelta(seconds=20), place)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"port {port}: MASTER_ADDR 0.0.0.0 names none" in line


def test_a_server_that_goes_meanwhile_does_not_open_another_everywhere(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    port = free_port()
    place = launch._read_place({"RANK": "0", "WORLD_SIZE": "2"})
    held = [launch._serve(port, timedelta(seconds=20), place)]

    def late(*args, **options):
        held.clear()  # the engine before this one ends, on another thread
        gc.collect()
        return TCPStore(*args, **options)

    monkeypatch.setattr(launch, "TCPStore", late)
    store = launch._serve(port, timedelta(seconds=20), place)
    assert store.port == port
    assert addresses_of(port) == {"127.0.0.1"}


@pytest.fixture
def rank_0_of_2(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_port_that_is_taken_is_named(rank_0_of_2):
    rank_0_of_2.setenv("MASTER_ADDR", "127.0.0.1")
    hurried = replace(FAST, store_timeout=timedelta(seconds=0.5))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        rank_0_of_2.setenv("MASTER_PORT", str(port))
        with pytest.raises(PeerFailure, match=f"in use: 127.0.0.1:{port}"):
            connect(hurried)


def test_a_port_at_which_this_process_serves_no_store_is_named(rank_0_of_2):
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        assert listening.listens_itself(port)
        rank_0_of_2.setenv("MASTER_ADDR", "127.0.0.1")
        place = launch._read_place(os.environ)
        with pytest.raises(OSError, match=f"already in use: 127.0.0.1:{port}"):
            launch._serve(port, timedelta(seconds=5), place)
    assert not listening.listens_itself(port)


def _users_own_server(rank):
    """The store of a default group that is gone still serves, since it is held."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    held = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    held.set(f"user's {rank}", "its own")
    with joined() as plane:
        told = plane.gather("rank", str(rank).encode(), phase="telling")
        return told, held.get(f"user's {rank}")  # rank 0, which serves it, goes last


@pytest.mark.distributed
def test_a_server_of_the_users_own_in_this_process_is_shared():
    expected = [b"0", b"1"], b"its own"
    assert run_ranks(_users_own_server, 2) == [expected] * 2


def test_a_name_that_cannot_be_one_is_refused_as_such(rank_0_of_2):
    rank_0_of_2.setenv("MASTER_ADDR", "a" * 70)
    rank_0_of_2.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ValueError, match="MASTER_ADDR: expected a name or an address"):
        connect(FAST)


def _after_another(rank, held_s):
    """Rank 0's port is another's until `held_s` after it asked for it."""
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        other = socket.create_server(("127.0.0.1", port))
        asks = launch.listening_socket

        def refused(*args, **options):
            threading.Timer(held_s, other.close).start()
            launch.listening_socket = asks
            with pytest.raises(OSError, match="in use") as caught:
                asks(*args, **options)
            raise caught.value

        launch.listening_socket = refused
    with joined() as plane:
        told = plane.gather("rank", str(rank).encode(), phase="telling")
    return told, rank != 0 or launch.listening_socket is asks


@pytest.mark.distributed
def test_a_port_that_becomes_free_is_taken():
    assert run_ranks(_after_another, 2, 0.5) == [([b"0", b"1"], True)] * 2


def _engines_of_a_process(rank):
    """Two engines side by side, then one more."""
    with joined(replace(FAST, run_name="a")) as first:
        with joined(replace(FAST, run_name="b")) as second:
            names = [first.info.run_id, second.info.run_id]
        with joined(replace(FAST, run_name="c")) as third:
            names.append(third.info.run_id)
    with joined() as last:
        return [*names, last.info.run_id]


@pytest.mark.distributed
def test_the_engines_of_a_process_share_its_port():
    first, second = run_ranks(_engines_of_a_process, 2)
    assert first == second and len({*first}) == 4


class TestHandingOver:
    def test_what_was_taken_stays_open(self):
        with socket.create_server(("127.0.0.1", 0)) as mine:
            taken = mine.dup()
        with handing_over(taken) as descriptor:
            pass
        with socket.socket(fileno=descriptor) as still:
            assert still.getsockname()[1] > 0

    def test_what_was_not_taken_is_closed(self):
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        with pytest.raises(ValueError), handing_over(listening):  # noqa: PT011
            raise ValueError
        assert addresses_of(port) == set()

    def test_another_file_of_its_number_is_left_alone(self, tmp_path):
        listening = socket.create_server(("127.0.0.1", 0))
        path = tmp_path / "other"
        path.write_text("x")
        with pytest.raises(ValueError), handing_over(listening) as descriptor:  # noqa: PT011
            os.close(descriptor)
            other = os.open(path, os.O_RDONLY)
            os.dup2(other, descriptor)
            raise ValueError
        assert os.read(descriptor, 1) == b"x"
        os.close(descriptor)
        if other != descriptor:
            os.close(other)
