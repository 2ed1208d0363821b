"""A failure has the same fields and one text in C++ and in Python, and is a type."""

import threading

import pytest
import torch
from torch import nn
from torch.distributed import AllreduceOptions
from torch.nn.parallel import DistributedDataParallel

from pipetransformer import _C
from pipetransformer.autodp import PeerFailure, build_group
from tests.autodp.world import SURVIVING, planes_on_one_store, until

FAILURE = _C.autodp.Failure(
    3, "all_reduce", epoch=4, deadline_s=2.5, reason="a peer\n  is gone"
)
FIELDS = (3, "all_reduce", 4, 2.5, "a peer is gone")
TEXT = (
    "peer failure: rank 3, phase 'all_reduce', plan epoch 4, deadline 2.5 s: a peer is "
    "gone"
)


def fields(failure):
    return (
        failure.rank,
        failure.phase,
        failure.epoch,
        failure.deadline_s,
        failure.reason,
    )


def groups_of(planes):
    """A group of all planes of this process; its members connect on threads."""
    built = {}
    members = [plane.rank for plane in planes]

    def build(plane):
        built[plane.rank] = build_group(plane, name="g/0", members=members)

    threads = [threading.Thread(target=build, args=[plane]) for plane in planes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [built[rank] for rank in members]


def test_a_failure_keeps_its_fields_on_every_way_from_cpp():
    with planes_on_one_store(2) as (planes, _):
        planes[0].core.fail(FAILURE)
        until(lambda: planes[1].failure is not None)  # told over the store
        for plane in planes:
            for raising in (
                plane.check,
                plane.core.check,
                lambda core=plane.core: core.read("key"),
                lambda plane=plane: plane.publish("key", b""),
            ):
                with pytest.raises(PeerFailure) as caught:
                    raising()
                assert fields(caught.value) == FIELDS
                assert str(caught.value) == str(plane.core.failure()) == TEXT
            assert fields(plane.core.failure()) == fields(plane.failure) == FIELDS


def test_what_is_not_known_is_none_on_both_sides():
    failure = _C.autodp.Failure(None, "connect", reason="nobody is there")
    assert fields(failure) == (None, "connect", None, None, "nobody is there")
    assert fields(PeerFailure.of(failure)) == fields(failure)
    assert str(failure) == "peer failure: rank unknown, phase 'connect': " + (
        "nobody is there"
    )


def test_text_that_utf8_cannot_express_is_shown_escaped():
    failure = PeerFailure(0, "user code", reason="no file 'caf\udce9'")
    assert failure.reason == r"no file 'caf\udce9'"


def test_a_collective_that_torch_waits_for_raises_the_failure_itself():
    with planes_on_one_store(2) as (planes, _):
        groups = groups_of(planes)
        work = groups[0].process_group.allreduce([torch.ones(3)], AllreduceOptions())
        planes[0].core.fail(FAILURE)
        with pytest.raises(PeerFailure) as caught:
            work.wait()
        assert fields(caught.value) == FIELDS
        for group in groups:
            group.retire()


def test_an_error_in_a_backward_becomes_the_failure_with_its_fields():
    with planes_on_one_store(2) as (planes, _):
        groups = groups_of(planes)
        model = DistributedDataParallel(
            nn.Linear(4, 1), process_group=groups[0].process_group, init_sync=False
        )
        # The other member never joins the collective, and says why.
        model.module.bias.register_hook(lambda grad: planes[1].core.fail(FAILURE))
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(PeerFailure) as caught, planes[0].guard():
            loss.backward()
        assert fields(caught.value) == FIELDS
        assert type(caught.value.__context__) is RuntimeError  # what autograd made
        for group in groups:
            group.retire()


def test_the_loss_of_a_store_that_is_outlived_is_told_from_other_errors():
    with planes_on_one_store(2, SURVIVING) as (planes, _):
        planes[0].outlive_store(True)
        store = planes[0].core.group_store()
        store.set("text", "no number")
        with pytest.raises(RuntimeError):
            store.add("text", 1)  # as a broken connection would
        assert planes[0].failure is None
        with pytest.raises(PeerFailure) as caught, planes[0].guard():
            planes[0].core.read("key")
        assert caught.value.phase == "store"
        with pytest.raises(RuntimeError) as other, planes[0].guard():
            raise RuntimeError("peer failure: in the user's own words")
        assert type(other.value) is RuntimeError
