"""Copies between host and device beside the work that is queued there."""

import math

import pytest
import torch

from pipetransformer.device import LaterNumber, bring, wait_for_queued
from tests.support.device_ranks import MARKS
from tests.support.fake_device import build_fake_device, load_fake_device
from tests.support.ranks import run_ranks

pytestmark = MARKS
TIMEOUT_S = 110
DEVICE = "fake:0"


@pytest.fixture(scope="module")
def library():
    return str(build_fake_device())


def test_on_the_host_all_is_there_and_known_at_once():
    x = torch.ones(3)
    tree = {"a": (x, 1), "b": [x]}
    moved = bring(tree, torch.device("cpu"))
    assert moved["a"][0] is x and moved["b"][0] is x and moved["a"][1] == 1
    number = LaterNumber(torch.tensor(2.5, requires_grad=True))
    assert number.is_known and number.read() == 2.5
    assert math.isnan(LaterNumber(torch.tensor(math.nan)).read())


def check_ends(_rank, library):
    fake = load_fake_device(library)
    x = torch.arange(6.0).view(2, 3)
    for pinned in (False, True):
        if pinned:
            fake.pin(x)
        queued = torch.ones(4, device=DEVICE) * 2
        there, same = bring((x, queued), torch.device(DEVICE))
        assert same is queued and there.device == torch.device(DEVICE)
        after = there * 3
        assert not fake.is_known(queued), "what was queued before is not waited for"
        assert torch.equal(after.cpu(), x * 3)
    held = torch.ones(2, requires_grad=True)
    bring(held, torch.device(DEVICE)).sum().backward()
    assert torch.equal(held.grad, torch.ones(2))

    loss = (torch.ones(4, device=DEVICE) * 2).sum()
    number = LaterNumber(loss)
    later = loss * 2
    loss.zero_()  # what was there when the number was made is what counts
    assert not number.is_known
    assert number.read() == 8.0 == number.read() and number.is_known
    assert not fake.is_known(later)
    wait_for_queued([torch.device(DEVICE)])
    assert fake.is_known(later)
    wait_for_queued([torch.device("cpu")])
    assert fake.violations() == []


def test_a_copy_waits_for_what_it_needs_alone(library):
    run_ranks(check_ends, 1, library, timeout_s=TIMEOUT_S)


def steps(fake):
    """Two steps as the training loop takes them."""
    weight = torch.ones(3, 3, device=DEVICE)
    numbers = []
    for _ in range(2):
        x, target = bring((torch.ones(2, 3), torch.zeros(2, 3)), torch.device(DEVICE))
        loss = (x @ weight - target).square().mean()
        del x, target
        numbers.append(LaterNumber(loss))
        weight = weight * 0.5
        del loss
        torch.ones(2, 3, device=DEVICE) * 1  # may get the memory that is free now
    return [number.read() for number in numbers]


def check_places(_rank, library):
    fake = load_fake_device(library)
    expected = steps(fake)
    fake.forget_places()
    assert steps(fake) == expected and fake.violations() == []
    noticed = {}
    for place in fake.places():
        if place.split()[1:]:  # else of torch's own
            fake.synchronize()
            fake.skip(place)
            steps(fake)
            fake.skip("")
            noticed[place] = bool(fake.violations())
    return noticed


def test_a_missing_wait_or_record_is_noticed(library):
    (noticed,) = run_ranks(check_places, 1, library, timeout_s=TIMEOUT_S)
    assert len(noticed) >= 3
    assert [place for place, seen in noticed.items() if not seen] == []
