"""Active groups with a backend for what is on devices, as NCCL's is.

The pretended one queues its work and ends it when a test says so; its tensors are on
the pretended accelerator. Each test runs in processes of its own.
"""

import importlib.util
import pathlib
import shutil
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipetransformer import _C
from pipetransformer.autodp import ControlPlane, PeerFailure, build_group, connect
from pipetransformer.autodp import group as group_module
from pipetransformer.autodp.backends import Backends, make_backends
from tests.autodp.world import FAST, joined, until
from tests.support.fake_device import (
    build_fake_device,
    build_library,
    load_fake_device,
)
from tests.support.ranks import run_ranks

TIMEOUT_S = 100
SLICE = timedelta(milliseconds=20)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]


@pytest.fixture(scope="module")
def libraries():
    source = pathlib.Path(__file__).parent / "cpp/device_backend.cpp"
    return str(build_fake_device()), str(build_library(source, python=True))


def load(libraries):
    load_fake_device(libraries[0])
    spec = importlib.util.spec_from_file_location("device_backend", libraries[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DeviceBackend


def make_group(plane, on_device, timeout_s=30):
    on_host = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, FAST.protocol_timeout)
    return _C.autodp.ActiveGroup(
        plane.core,
        dist.HashStore(),
        on_host,
        on_device,
        device_type="fake",
        timeout=timedelta(seconds=timeout_s),
    )


def start(group):
    return group.process_group.allreduce([torch.ones(2, device="fake:0")])


def check_end(_rank, libraries):
    on_device = load(libraries)(0, 1)
    with joined() as plane:
        group = make_group(plane, on_device)
        work = start(group)
        work.wait()  # for the call: streams wait for the rest
        assert not _C.autodp.wait_done(work, SLICE)
        on_device.end()
        assert _C.autodp.wait_done(work, SLICE)
        # What is on the host does not come to this backend, and a barrier blocks.
        group.process_group.barrier().wait()
        group.process_group.allreduce([torch.ones(2)]).wait()
        assert on_device.calls == 1
        assert on_device.aborts == 0
        group.retire()


def test_work_ends_when_the_device_has_done_it(libraries):
    run_ranks(check_end, 1, libraries, timeout_s=TIMEOUT_S)


def check_failure(_rank, libraries, refuses):
    on_device = load(libraries)(0, 1, refuses)
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    group = make_group(plane, on_device)
    works = [start(group) for _ in range(3)]
    assert not any(_C.autodp.wait_done(work, SLICE) for work in works)
    plane.fail("user code", "no more")
    until(lambda: on_device.aborts)
    for work in works:
        assert _C.autodp.wait_done(work, SLICE)
        with pytest.raises(PeerFailure, match="no more"):
            work.wait()
    with pytest.raises(PeerFailure, match="no more"):
        start(group)
    group.retire()
    plane.close()
    assert on_device.aborts == 1  # and not once more at the end


@pytest.mark.parametrize("refuses", ["", "no communicator"])
def test_failure_aborts_what_is_on_the_device(libraries, refuses):
    run_ranks(check_failure, 1, libraries, refuses, timeout_s=TIMEOUT_S)


def check_given_up(_rank, libraries, looks):
    """A collective that its backend gives up ends as if it were done."""
    on_device = load(libraries)(0, 1)
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    group = make_group(plane, on_device)
    work = start(group)
    group.check_ended()  # nothing has ended yet
    on_device.end()
    group.check_ended()
    gone = start(group)
    on_device.end("the way to rank 1 is gone. Advice")
    gone.wait()
    assert _C.autodp.wait_done(work, SLICE) and _C.autodp.wait_done(gone, SLICE)
    said = "all_reduce.*a peer is gone: the way to rank 1 is gone"
    with pytest.raises(PeerFailure, match=said):
        group.check_ended() if looks else start(group).wait()
    with pytest.raises(PeerFailure, match=said):
        group.check_ended()
    assert on_device.calls == 2, "nothing is queued behind it"
    until(lambda: on_device.aborts)
    group.retire()
    plane.close()


@pytest.mark.parametrize("looks", [True, False])
def test_a_collective_that_was_given_up_fails_the_run(libraries, looks):
    run_ranks(check_given_up, 1, libraries, looks, timeout_s=TIMEOUT_S)


def check_retire(_rank, libraries):
    made = load(libraries)
    with joined() as plane:
        for ended in (False, True):
            on_device = made(0, 1)
            group = make_group(plane, on_device)
            start(group)
            if ended:
                on_device.end()
            group.retire()
            if not ended:
                with pytest.raises(AssertionError):
                    until(lambda one=on_device: one.aborts, within_s=0.3)
                on_device.end()
            until(lambda one=on_device: one.aborts)
            assert on_device.aborts == 1
            with pytest.raises(RuntimeError, match="got one that was retired"):
                start(group)
        # A work that never ends does not keep the plane's thread.
        on_device = made(0, 1)
        group = make_group(plane, on_device, timeout_s=0.5)
        start(group)
        group.retire()
        until(lambda: on_device.aborts)


def test_retired_group_waits_for_the_device_and_frees_its_communicators(libraries):
    run_ranks(check_retire, 1, libraries, timeout_s=TIMEOUT_S)


def check_messages(rank, libraries):
    made = load(libraries)

    def make(store, rank, size, **options):
        return Backends(
            make_backends(store, rank, size, **options).on_host, made(rank, size)
        )

    with joined() as plane, mock.patch.object(group_module, "make_backends", make):
        group = build_group(
            plane, name="g/0", members=[0, 1], devices=[torch.device("fake:0")]
        )
        assert group.all_gather_bytes(b"x" * rank) == [b"", b"x"]
        assert group.broadcast_bytes(b"long" * 20000, 1) == b"long" * 20000
        group.barrier()
        with pytest.raises(RuntimeError, match="expected no tensors on the host"):
            made(0, 1).allreduce([torch.ones(1)]).wait()
        group.retire()


def test_members_exchange_messages_beside_the_device(libraries):
    run_ranks(check_messages, 2, libraries, timeout_s=TIMEOUT_S)


def test_devices_of_several_types_are_refused():
    with joined() as plane, pytest.raises(ValueError, match="devices of one type"):
        devices = [torch.device("cuda:0"), torch.device("cpu")]
        build_group(plane, name="g/0", members=[0], devices=devices)
