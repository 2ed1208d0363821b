"""Streams of a pipeline, on a pretended accelerator that reports what is unordered.

Each test runs in a process of its own: the device is registered for good, and must be
before autograd starts its threads.
"""

import itertools

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, PipeSequential
from pipetransformer.testing.ablation import Ablation, ablate
from tests.support.fake_device import build_fake_device, load_fake_device
from tests.support.fake_device import place as place_layers
from tests.support.ranks import run_ranks

from .models import MODES, Functional
from .placed import CUTS, MARKS, PLACES, TIMEOUT_S, make_pipe, plain_model, rows, train
from .skips import Pop, Stash

pytestmark = MARKS


@pytest.fixture(scope="module")
def library():
    return str(build_fake_device())


def check_matrix(_rank, library, own_streams, copy_streams):
    fake = load_fake_device(library)
    expected = train(plain_model(), rows())
    for places, mode in itertools.product(PLACES, MODES):
        case = f"{places} {mode} own={own_streams} copy={copy_streams}"
        pipe = make_pipe(places, mode, own_streams=own_streams)
        ablate(pipe, Ablation(copy_streams=copy_streams))
        actual = train(pipe, rows(places[0]))
        for mine, plain in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, plain, msg=case)
        pipe.close()
        del pipe
        found = fake.violations()
        assert found == [], (case, found[:3])
    assert fake.num_blocks() == 0


@pytest.mark.parametrize("copy_streams", [True, False], ids=["copy", "no_copy"])
@pytest.mark.parametrize("own_streams", [False, True], ids=["callers", "own"])
def test_training_is_ordered_and_memory_safe(library, own_streams, copy_streams):
    run_ranks(check_matrix, 1, library, own_streams, copy_streams, timeout_s=TIMEOUT_S)


def check_faults(_rank, library, fault, expected):
    fake = load_fake_device(library)
    for places, own_streams in ((PLACES[1], False), (PLACES[0], True)):
        pipe = make_pipe(places, own_streams=own_streams)
        x = rows(places[0])
        fake.synchronize()
        fake.disable(fault)
        train(pipe, x)
        fake.disable("")
        found = fake.violations()
        assert any(expected in line for line in found), (places, own_streams, found)


@pytest.mark.parametrize(
    ("fault", "expected"), [("wait", "may still write"), ("keep", "is freed while")]
)
def test_a_missing_wait_or_record_is_noticed(library, fault, expected):
    run_ranks(check_faults, 1, library, fault, expected, timeout_s=TIMEOUT_S)


def on_streams(pipe, x, targets):
    """Two steps whose inputs and weights are written on the caller's streams."""
    for _ in range(2):
        mine = (x * 1).detach().requires_grad_()
        if targets is None:
            loss = (pipe(mine) ** 2).sum()
        else:
            loss = pipe(mine, targets=targets.clone())
        loss.backward()
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter -= 0.01 * parameter.grad
        pipe.zero_grad()
        del loss
        mine.grad * 1


def check_places(_rank, library):
    """Leave out the waits and records of each place in the code; tell what is noticed.

    A place is a call in the extension with its caller.
    """
    fake = load_fake_device(library)
    cuts, noticed = [0, 1, 3, 4], {}
    for places, schedule, mode, own_streams in itertools.product(
        (PLACES[0], PLACES[1], PLACES[4], PLACES[5]),
        ("gpipe", "1f1b", "zb-h1"),
        ("never", "always"),
        (False, True),
    ):
        torch.manual_seed(0)
        layers = [Stash(), nn.Linear(6, 6), nn.Linear(6, 6), Pop()]
        pipe = Pipe.from_plan(
            place_layers(nn.Sequential(*layers).double(), cuts, places),
            cuts=cuts,
            num_microbatches=2,
            checkpoint=mode,
            devices=[torch.device(place) for place in places],
            own_streams=own_streams,
            schedule=schedule,
            loss=None if schedule == "gpipe" else loss_of,
        )
        x = rows(places[0])
        targets = None if schedule == "gpipe" else rows().cos()
        fake.forget_places()
        on_streams(pipe, x, targets)
        assert fake.violations() == []
        for place in fake.places():
            if noticed.setdefault(place, False):
                continue
            fake.synchronize()
            fake.skip(place)
            on_streams(pipe, x, targets)
            fake.skip("")
            noticed[place] = bool(fake.violations())
        fake.synchronize()
        fake.violations()
        pipe.close()
    return noticed


def test_what_is_missing_at_any_place_in_the_code_is_noticed(library):
    (noticed,) = run_ranks(check_places, 1, library, timeout_s=TIMEOUT_S)
    # Others are calls of torch's own, which orders more than it needs to.
    ours = {place: seen for place, seen in noticed.items() if place.split()[1:]}
    assert len(ours) >= 10
    assert [place for place, seen in ours.items() if not seen] == []


def check_copies(_rank, library):
    fake = load_fake_device(library)
    places = PLACES[1]
    pipe = make_pipe(places)
    x = rows(places[0])
    seen = []
    for _ in range(2):
        fake.copies()
        train(pipe, x, steps=1)
        borders = set(fake.copies())
        seen.append({c for c in borders if "host" not in c and "/0" not in c})
    # Two borders, two directions, none on a stream that computes (stream 0).
    pairs = {("0", "1"), ("1", "0"), ("1", "2"), ("2", "1")}
    assert {(c.split("/")[0], c.split(" -> ")[1][0]) for c in seen[0]} == pairs
    assert len(seen[0]) == 4 and seen[0] == seen[1]
    streams = [end for c in seen[0] for end in c.split(" -> ")]
    assert all(int(end.split("/")[1]) > 100 for end in streams), "of high priority"
    assert len(set(streams)) == len(streams)

    pipe = make_pipe(places)
    ablate(pipe, Ablation(copy_streams=False))
    fake.copies()
    train(pipe, x, steps=1)
    between = [c for c in fake.copies() if "host" not in c]
    assert between and all(c.count("/0") == 2 for c in between)
    assert fake.violations() == []


def test_copies_run_on_streams_of_their_own_and_reuse_them(library):
    run_ranks(check_copies, 1, library, timeout_s=TIMEOUT_S)


class Watch(torch.autograd.Function):
    """Passes a tensor through; calls a function in forward and in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_call = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.backward_call()
        return grad, None, None


def check_borders(_rank, library):
    fake = load_fake_device(library)
    for places, own_streams in ((PLACES[1], False), (PLACES[0], True)):
        devices = [torch.device(place).index for place in places[:2]]
        streams = [None, None]
        ends, starts = [], []  # of stage 0's forward and stage 1's backward cells
        known_forward, known_backward = [], []

        def count(of, by, devices=devices, streams=streams):
            streams[by] = fake.current_stream(devices[by])
            if streams[of] is None:
                return 0
            return fake.knows(devices[by], streams[by], devices[of], streams[of])

        def watch(module, forward, backward):
            return nn.Sequential(
                module, Functional(lambda x: Watch.apply(x, forward, backward))
            )

        layers = [
            watch(
                nn.Linear(6, 6),
                lambda ends=ends, count=count: ends.append(count(0, 0)),
                lambda known=known_backward, count=count: known.append(count(1, 0)),
            ),
            watch(
                nn.Linear(6, 6),
                lambda known=known_forward, count=count: known.append(count(0, 1)),
                lambda starts=starts, count=count: starts.append(count(1, 1)),
            ),
        ]
        layers = place_layers(nn.Sequential(*layers).double(), [0, 1, 2], places[:2])
        pipe = Pipe.from_plan(
            layers,
            cuts=[0, 1, 2],
            num_microbatches=8,
            devices=[torch.device(place) for place in places[:2]],
            own_streams=own_streams,
        )
        train(pipe, torch.randn(16, 6, dtype=torch.double).to(places[0]), steps=1)
        assert len(known_forward) == len(ends) == len(starts) == 8
        for known, end in zip(known_forward, ends, strict=True):
            assert 0 < known <= end, (known_forward, ends)
        for known, next_start in zip(known_backward, starts[1:], strict=False):
            assert 0 < known <= next_start, (known_backward, starts)
        assert (found := fake.violations()) == [], found


def test_stages_wait_for_the_cell_they_need_and_no_later_one(library):
    run_ranks(check_borders, 1, library, timeout_s=TIMEOUT_S)


def loss_of(output, targets):
    return ((output - targets) ** 2).mean()


def check_steps(_rank, library, schedule):
    """Skip lanes, split backward, targets; delivered under other streams."""
    fake = load_fake_device(library)
    cuts = [0, 1, 3, 4]

    def build():
        torch.manual_seed(0)
        layers = [Stash(), nn.Linear(6, 6), nn.Linear(6, 6), Pop()]
        return nn.Sequential(*layers).double()

    plain, x, targets = PipeSequential(*build()), rows(), rows().cos()
    leaf = x.clone().requires_grad_()
    expected = loss_of(plain(leaf), targets) * 3
    expected.backward()
    for places, own_streams, mode, dispatch in itertools.product(
        PLACES, (False, True), MODES, ("serial", "threads")
    ):
        case = f"{places} {own_streams} {mode} {dispatch}"
        pipe = Pipe.from_plan(
            place_layers(build(), cuts, places),
            cuts=cuts,
            num_microbatches=4,
            checkpoint=mode,
            devices=[torch.device(place) for place in places],
            own_streams=own_streams,
            dispatch=dispatch,
            schedule=schedule,
            loss=None if schedule == "gpipe" else loss_of,
        )
        mine = x.to(places[0]).detach().clone().requires_grad_()
        if schedule == "gpipe":
            loss = loss_of(pipe(mine), targets.to(places[-1])) * 3
        else:
            loss = pipe(mine, targets=targets.clone()) * 3
        for device in range(4):
            fake.set_stream(device, 50)
        loss.backward()
        value = loss.detach()
        del loss
        grads = [mine.grad * 1, *(p.grad * 1 for p in pipe.parameters())]
        found = fake.violations()
        assert found == [], (case, found[:3])
        fake.synchronize()
        for device in range(4):
            fake.set_stream(device, 0)
        torch.testing.assert_close(value.cpu(), expected.detach(), msg=case)
        wanted = [leaf.grad, *(p.grad for p in plain.parameters())]
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other, msg=case)
        pipe.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_lanes_and_steps_are_ordered_and_memory_safe(library, schedule):
    run_ranks(check_steps, 1, library, schedule, timeout_s=TIMEOUT_S)


def check_devices(_rank, library):
    fake = load_fake_device(library)
    for own_streams in (False, True):
        places = ["fake:2", "fake:3", "fake:2"]
        pipe = make_pipe(places, own_streams=own_streams)
        x = rows(places[0])
        before = [fake.count(f"device {k}") for k in range(4)]
        train(pipe, x)
        after = [fake.count(f"device {k}") for k in range(4)]
        assert after[:2] == before[:2], "contexts on devices without a stage"
        assert after[2] > before[2] and after[3] > before[3]
        assert (found := fake.violations()) == [], found


def test_waits_make_no_context_on_other_devices(library):
    run_ranks(check_devices, 1, library, timeout_s=TIMEOUT_S)


def squares(output, target):
    return ((output - target) ** 2).mean()


def check_targets(_rank, library):
    fake = load_fake_device(library)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double()
    places = ["fake:0", "fake:1", "fake:2"]
    place_layers(layers, CUTS, places)
    pipe = Pipe.from_plan(
        layers,
        cuts=CUTS,
        num_microbatches=4,
        schedule="1f1b",
        loss=squares,
        devices=[torch.device(place) for place in places],
    )
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    fake.pin(x)
    fake.pin(y)
    for _ in range(2):
        fake.copies()
        loss = pipe(x.to("fake:0").requires_grad_(), targets=y)
        (loss * 3).backward()
        copies = fake.copies()
        # The scale comes from the last device: once to each other one.
        others = [c for c in copies if c.startswith("2/") and "-> host" not in c]
        assert sum(" -> 0/" in c for c in others) == 1, copies
        assert (found := fake.violations()) == [], found


def test_targets_in_pinned_memory_are_read_before_the_step_returns(library):
    run_ranks(check_targets, 1, library, timeout_s=TIMEOUT_S)
