"""The engine on the pretended accelerator, which reports every missing wait.

Each run is in processes of its own: the device is registered for good.
"""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import autocache, planner
from pipetransformer.autocache import ActivationCache, TierRates
from tests.engine.even_profile import even_profile
from tests.engine.scenario import (
    config,
    is_active,
    make_engine,
    schedule,
    train,
    train_on,
)
from tests.support.device_ranks import MARKS, NODE, on_host, pretend
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy

TIMEOUT_S = 110

pytestmark = MARKS

FREEZES = schedule(0, 2, 4, 6)
# The budget forces K=4 unfrozen; freezing lets shorter pipelines fit.
SHRINKING = pt.PlanConfig(slot_memory_bytes=2 * 13_500, reshape="always")


def train_there(rank, libraries, freeze, epochs, options):
    fake = pretend(libraries)
    result = train(rank, freeze, epochs, {"dtype": torch.float64, **options})
    fake.synchronize()
    return {**on_host(result), "violations": fake.violations()}


def run_there(libraries, world_size, freeze, epochs, devices, **options):
    settings = options.pop("config", config())
    options["config"] = dataclasses.replace(settings, devices=devices)
    return run_ranks(
        train_there,
        world_size,
        libraries,
        freeze,
        epochs,
        options,
        timeout_s=TIMEOUT_S,
    )


def run_here(world_size, freeze, epochs, **options):
    options = {"dtype": torch.float64, **options}
    return run_ranks(train, world_size, freeze, epochs, options, timeout_s=TIMEOUT_S)


def assert_same_run(there, here):
    assert there["violations"] == []
    for name in ("after", "before"):
        assert there[name] == pytest.approx(here[name], rel=1e-9)
    for mine, plain in zip(there["model"], here["model"], strict=True):
        assert mine.is_cpu
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)


def hits_of(result):
    epochs = result["history"]["epochs"]
    return [(e["cache_hits"], e["cache_misses"]) for e in epochs]


@pytest.mark.parametrize(
    ("stages", "devices"),
    [(1, NODE[:1]), (2, NODE[:2]), (4, NODE), (4, (NODE[2],) * 4)],
)
def test_one_process_trains_as_on_the_host(libraries, stages, devices):
    shape = pt.PlanConfig(num_stages=stages, num_microbatches=2)
    slots = pt.PipeConfig(num_slots=stages)
    settings = config(plan=shape, pipe=slots, clip_grad_norm=1.0)
    (there,) = run_there(libraries, 1, FREEZES, 4, devices, config=settings)
    (here,) = run_here(1, FREEZES, 4, config=settings)
    assert_same_run(there, here)
    assert hits_of(there) == hits_of(here) == [(0, 0), (0, 50), (50, 0), (50, 0)]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("caches", [True, False])
def test_a_pipelined_prefix_trains_as_on_the_host(libraries, stages, caches):
    shape = pt.PlanConfig(num_stages=stages, num_microbatches=3)
    cached = pt.CacheConfig(enabled=caches, audit_every=3)
    slots = pt.PipeConfig(num_slots=stages)
    here = config(plan=shape, pipe=slots, cache=cached)
    there = dataclasses.replace(
        here, plan=dataclasses.replace(shape, prefix="pipelined")
    )
    freezes = schedule(0, 2, 4, 4, 6, 1)
    (result,) = run_there(libraries, 1, freezes, 6, NODE[:stages], config=there)
    (plain,) = run_here(1, freezes, 6, config=here)
    assert_same_run(result, plain)
    assert hits_of(result) == hits_of(plain)


def check_chunks(_rank, libraries):
    fake = pretend(libraries)
    settings = config(
        plan=pt.PlanConfig(num_stages=2, num_microbatches=2, prefix="pipelined"),
        devices=NODE[:2],
    )
    engine = make_engine(freeze=schedule(4), dtype=torch.float64, config=settings)
    model, seen = model_of(engine), []
    data = ToySet(48, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(data, 12):
                engine.step(batch)
            engine.evaluate(ToySet(20, dtype=torch.float64), {})
            seen.append([str(next(layer.parameters()).device) for layer in model])
        told = str(engine.explain())
    fake.synchronize()
    return seen, told, fake.violations()


def test_each_device_has_a_chunk_of_a_pipelined_prefix(libraries):
    ((seen, told, violations),) = run_ranks(check_chunks, 1, libraries)
    assert violations == [] and "5 frozen layers pipelined" in told
    for placed in seen[:2]:
        chunks = [device for device in placed[:5]]
        assert chunks == sorted(chunks) and set(chunks) == set(NODE[:2])
    assert set(seen[2][:5]) <= {"cpu", *NODE[:2]}  # all is cached: they may rest


def test_a_prefix_is_not_pipelined_on_the_host():
    settings = config(plan=pt.PlanConfig(prefix="pipelined"))
    with pytest.raises(ValueError, match="expected 'auto', 'replicated' or 'filled'"):
        with make_engine(freeze=schedule(0), config=settings):
            pass


def check_filled(_rank, libraries):
    pretend(libraries)
    settings = config(plan=pt.PlanConfig(prefix="filled"), devices=NODE[:2])
    with pytest.raises(ValueError, match="expected 'auto', 'replicated' or 'pipelin"):
        with make_engine(freeze=schedule(0), config=settings):
            pass


def test_gaps_are_not_filled_on_devices(libraries):
    run_ranks(check_filled, 1, libraries)


def check_tight(_rank, libraries, devices):
    """Return where five frozen layers go, by the memory of a slot; None: nowhere."""
    if devices[0] != "cpu":
        pretend(libraries)
    found = {}
    for memory in range(14_000, 6_000, -500):
        settings = config(
            plan=pt.PlanConfig(num_stages=2, slot_memory_bytes=memory),
            pipe=pt.PipeConfig(num_slots=2),
            devices=devices,
            cache=pt.CacheConfig(enabled=False),
        )
        try:
            with make_engine(freeze=schedule(4), config=settings) as engine:
                engine.prepare(ToySet(24), 12)
                found[memory] = engine.plan.prefix
                assert max(engine.plan.bytes_per_stage) <= memory
        except planner.InfeasiblePlan:
            found[memory] = None
    return found


def test_a_prefix_that_fits_only_in_chunks_is_pipelined_on_devices(libraries):
    (here,) = run_ranks(check_tight, 1, libraries, ("cpu",) * 2)
    (there,) = run_ranks(check_tight, 1, libraries, NODE[:2])
    assert set(here.values()) - {"replicated"} == {"filled", None}
    tight = [memory for memory, prefix in here.items() if prefix is None]
    assert "pipelined" in {there[memory] for memory in tight}
    assert all(there[memory] for memory, prefix in here.items() if prefix)


@pytest.mark.parametrize("devices", [NODE, NODE[:2], NODE[:1]])
def test_replicas_grow_as_on_the_host(libraries, devices):
    settings = config(plan=SHRINKING)
    there = run_there(libraries, 4, FREEZES, 4, devices, config=settings)
    here = run_here(4, FREEZES, 4, config=settings)
    epochs = there[0]["history"]["epochs"]
    assert [e["num_stages"] for e in epochs] == [4, 4, 2, 1]
    assert [e["num_replicas"] for e in epochs] == [1, 1, 2, 4]
    assert hits_of(there[0]) == hits_of(here[0])
    assert_same_run(there[0], here[0])
    for result in there:
        assert result["violations"] == []
        # A change of plan changes no bit: what is evaluated before and after is equal.
        assert result["before"][:-1] == result["after"][1:]


def moments_of(engine):
    """Return where the optimizer holds its moments."""
    return {
        str(value.device)
        for state in run_of(engine).state.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    }


def check_hand_over(rank, libraries):
    """Freeze to one device for each replica, and back to one replica on four."""
    fake = pretend(libraries)
    settings = config(plan=SHRINKING, devices=NODE)
    engine = make_engine(freeze=schedule(0, 6, 0), dtype=torch.float64, config=settings)
    model, seen = model_of(engine), []
    data = ToySet(50, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(data, 12):
                engine.step(batch)
            placed = [str(next(layer.parameters()).device) for layer in model]
            seen.append((placed, moments_of(engine) if is_active(engine) else set()))
    assert all(p.is_cpu for p in model.parameters())
    fake.synchronize()
    return seen, fake.violations()


def test_devices_are_handed_over_and_back(libraries):
    results = run_ranks(check_hand_over, 4, libraries, timeout_s=TIMEOUT_S)
    for rank, (seen, violations) in enumerate(results):
        assert violations == []
        first, second, third = seen
        assert second == ([f"fake:{rank}"] * 8, {f"fake:{rank}", "cpu"})
        for placed, moments in (first, third):
            if rank == 0:
                assert list(dict.fromkeys(placed)) == list(NODE)
                assert moments == set(NODE)
            else:
                assert placed == ["cpu"] * 8
        assert rank == 0 or first[1] == set()


def check_rest(_rank, libraries, devices, audit_every):
    """Train on frozen layers; return where they are when a pass begins and ends."""
    fake = pretend(libraries)
    settings = config(
        devices=devices,
        plan=pt.PlanConfig(num_stages=2, num_microbatches=2),
        pipe=pt.PipeConfig(num_slots=2),
        cache=pt.CacheConfig(audit_every=audit_every),
    )
    engine = make_engine(
        freeze=schedule(2, 2, 2, 3, 3, 3), dtype=torch.float64, config=settings
    )
    data, held = (ToySet(n, dtype=torch.float64) for n in (48, 20))
    model, seen, losses = model_of(engine), [], []

    def places():
        return [str(next(layer.parameters()).device) for layer in list(model)[:4]]

    with engine:
        for epoch in engine.epochs(6):
            told = []
            for batch in engine.batches(data, 12):
                losses.append(float(engine.step(batch)))
                told.append(places())
            if epoch in (1, 4):
                losses.append(engine.evaluate(held, {}, name="val")["loss"])
            seen.append([told[0], told[-1], places()])
    fake.synchronize()
    return seen, losses, engine.history.cache, fake.violations()


@pytest.mark.parametrize("audit_every", [1000, 5])
def test_frozen_layers_rest_on_the_host_while_all_is_cached(libraries, audit_every):
    ((seen, losses, cache, found),) = run_ranks(
        check_rest, 1, libraries, NODE[:2], audit_every
    )
    ((_, plain, _, _),) = run_ranks(check_rest, 1, libraries, ("cpu",) * 2, audit_every)
    assert found == [] and losses == pytest.approx(plain, rel=1e-9)
    assert (cache[2]["audited"] > 0) == (audit_every == 5)
    boundaries = [3, 3, 3, 4, 4, 4]  # with the layer before the units
    for epoch, (boundary, (first, last, after)) in enumerate(
        zip(boundaries, seen, strict=True)
    ):
        frozen = {place for placed in (first, last) for place in placed[:boundary]}
        # Computed, then found; from then on they rest. So it is after each advance.
        assert frozen == {"cpu"} if epoch in (2, 5) else frozen == {"fake:0"}, epoch
        # An evaluation whose set is not cached needs them, and for no longer.
        if epoch in (1, 4):
            assert set(after[:boundary]) == {"fake:0"}
        assert all(p.startswith("fake") for p in first[boundary:])


def check_uneven(rank, libraries, devices):
    """Two replicas; one finds all of its records, the other misses one."""
    fake = None if devices[0] == "cpu" else pretend(libraries)
    settings = config(
        devices=devices, plan=pt.PlanConfig(num_stages=1, num_microbatches=2)
    )
    engine = make_engine(freeze=schedule(2), dtype=torch.float64, config=settings)
    model, losses, rests = model_of(engine), [], []
    for layer in model:  # as running statistics, or positions
        layer.register_buffer("extra", torch.ones(3, dtype=torch.float64))
    fetch, missing = ActivationCache.fetch, []

    def incomplete(self, *args, **options):
        found = fetch(self, *args, **options)
        return [] if missing and missing.pop() else found

    ActivationCache.fetch = incomplete
    with engine:
        for epoch in engine.epochs(4):
            missing[:] = [True] if (epoch, rank) == (2, 1) else []
            for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                losses.append(float(engine.step(batch)))
            rests.append(next(model[0].parameters()).is_cpu)
        shape = engine.plan.num_replicas
    if fake is not None:
        fake.synchronize()
    return shape, losses, rests, fake.violations() if fake is not None else []


def test_replicas_rest_apart_from_each_other(libraries):
    there = run_ranks(check_uneven, 2, libraries, NODE[:2])
    here = run_ranks(check_uneven, 2, libraries, ("cpu",) * 2)
    for (shape, losses, _, found), (_, plain, _, _) in zip(there, here, strict=True):
        assert shape == 2 and found == []
        assert losses == pytest.approx(plain, rel=1e-9)
    assert there[0][2] == [False, False, True, True]
    assert there[1][2] == [False, False, False, False]


def check_copies(rank, libraries, devices, device_bytes, cache):
    """Train with copies of records on devices; return losses and what was found."""
    fake = None if devices[0] == "cpu" else pretend(libraries)
    settings = config(
        devices=devices,
        plan=pt.PlanConfig(num_stages=1, num_microbatches=2),
        cache=pt.CacheConfig(device_bytes=device_bytes, **cache),
    )
    engine = make_engine(
        freeze=schedule(2, 2, 2, 3, 3, 3), dtype=torch.float64, config=settings
    )
    losses, taken = [], []
    with engine:
        for _ in engine.epochs(6):
            for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                losses.append(float(engine.step(batch)))
            taken.append(run_of(engine).caches.training().device_bytes)
        told = str(engine.explain())
    counts = [(each.get("device_hits", 0), each) for each in engine.history.cache]
    if fake is not None:
        fake.synchronize()
    return losses, counts, taken, told, fake.violations() if fake is not None else []


def losses_of(results):
    """Return the losses of the global batches; shares are equal."""
    return [
        sum(each) / len(results) for each in zip(*(r[0] for r in results), strict=True)
    ]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("cache", [{}, {"debug": True}, {"audit_every": 5}], ids=str)
def test_records_are_read_from_copies_on_the_device(libraries, replicas, cache):
    arguments = (replicas, libraries, NODE[:replicas])
    there = run_ranks(check_copies, *arguments, 10**6, cache)
    apart = run_ranks(check_copies, *arguments, None, cache)
    assert losses_of(there) == pytest.approx(losses_of(apart), rel=1e-9)
    for (_, counts, taken, told, found), (_, none, _, _, _) in zip(
        there, apart, strict=True
    ):
        assert found == []
        hits = [each["hits"] for _, each in counts]
        assert hits == [each["hits"] for _, each in none] == [0, 48, 48, 48, 48, 48]
        assert [number for number, _ in none] == [0] * 6
        # Computed, read, copied; and so again at the next boundary.
        copied = [number for number, _ in counts]
        assert [bool(number) for number in copied] == [0, 0, 1, 0, 0, 1]
        assert all(number == 48 for number in copied if number) or replicas > 1
        assert 24 < copied[2] <= 48, "most samples come to the same replica again"
        assert taken[0] == taken[3] == 0 < taken[2] <= 10**6
        assert (sum(each["audited"] for _, each in counts) > 0) == bool(cache)
        assert "cache: " not in told, "these tests measure no rates"


def check_kept_rates(_rank, libraries, folder):
    """Open four runs; return their rates of copies, and how often they measured."""
    pretend(libraries)
    planner.profile = even_profile
    rates = TierRates(
        bytes_per_s=10**9, record_ns=9, write_bytes_per_s=10**9, write_record_ns=9
    )
    answers, found = [None, rates], []  # no memory at first
    autocache.measure_rates = lambda *_, **__: rates
    autocache.measure_device_rates = lambda *_, **__: answers.pop(0)
    for _ in range(4):
        settings = config(
            devices=NODE[:1],
            plan=pt.PlanConfig(num_stages=1, profile=folder),
            cache=pt.CacheConfig(device_bytes=10**6),
        )
        with make_engine(freeze=schedule(0), config=settings) as engine:
            engine.prepare(ToySet(24), 12)
            found.append(run_of(engine).inputs.rates.device)
    return found == [None, rates, rates, rates] and answers == []


def test_rates_of_copies_are_kept_and_measured_anew_if_they_failed(libraries, tmp_path):
    assert run_ranks(check_kept_rates, 1, libraries, tmp_path) == [True]


@pytest.mark.parametrize("share", [1, 20])
def test_the_memory_for_copies_is_bounded(libraries, share):
    budget = (share + 1) * 8 * 8  # of fp64, and the place that is empty
    ((losses, counts, taken, _, found),) = run_ranks(
        check_copies, 1, libraries, NODE[:1], budget, {}
    )
    ((plain, *_),) = run_ranks(check_copies, 1, libraries, NODE[:1], None, {})
    assert found == [] and losses == pytest.approx(plain, rel=1e-9)
    assert counts[2][0] <= share and max(taken) <= budget


def check_left(_rank, libraries, slot_memory_bytes):
    """Return the predicted bytes of the only stage, and those of the copies."""
    fake = pretend(libraries)
    settings = config(
        plan=pt.PlanConfig(num_stages=1, slot_memory_bytes=slot_memory_bytes),
        devices=NODE[:1],
        cache=pt.CacheConfig(device_bytes=10**6),
    )
    engine = make_engine(freeze=schedule(4), dtype=torch.float64, config=settings)
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                engine.step(batch)
        copied = run_of(engine).caches.training().device_bytes
        (used,) = engine.plan.bytes_per_stage
    fake.synchronize()
    return used, copied


@pytest.mark.parametrize("spare", [0, 640, 10**5])
def test_copies_take_what_the_plan_leaves_free(libraries, spare):
    ((used, whole),) = run_ranks(check_left, 1, libraries, None)
    ((_, copied),) = run_ranks(check_left, 1, libraries, used + spare)
    assert whole == 8 * 8 * 49 and copied == min(whole, int(spare * 0.9) // 64 * 64)


def test_slots_of_the_host_have_no_copies(libraries):
    ((_, counts, taken, _, _),) = run_ranks(
        check_copies, 1, libraries, ("cpu",), 10**6, {}
    )
    assert taken == [0] * 6 and all(number == 0 for number, _ in counts)


class Weighted(nn.CrossEntropyLoss):
    """A loss with weights of its own, as many have."""

    def __init__(self):
        super().__init__(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


def check_own_loop(_rank, libraries, devices):
    """Losses of the user's own calls, on targets of the engine's batches."""
    fake = pretend(libraries)
    settings = config(
        devices=devices,
        check_loss=False,
        plan=pt.PlanConfig(num_stages=len(devices)),
        pipe=pt.PipeConfig(num_slots=len(devices)),
    )
    engine = make_engine(
        freeze=schedule(0, 2), loss=Weighted(), dtype=torch.float64, config=settings
    )
    data, losses = ToySet(50, dtype=torch.float64), []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data, 12):
                outputs = engine.model(batch)
                assert batch.targets.device == outputs.device
                loss = nn.functional.cross_entropy(outputs, batch.targets)
                engine.backward(loss)
                engine.update()
                losses.append(float(loss))
        losses.append(engine.evaluate(data, {"accuracy": accuracy})["loss"])
        predicted = engine.predict(data)
        assert predicted.is_cpu
    fake.synchronize()
    return losses, predicted, fake.violations()


def test_own_loops_losses_and_predictions_are_those_of_the_host(libraries):
    ((mine, predicted, found),) = run_ranks(check_own_loop, 1, libraries, NODE)
    ((plain, expected, _),) = run_ranks(check_own_loop, 1, libraries, ("cpu",) * 4)
    assert found == []
    assert mine == pytest.approx(plain, rel=1e-9)
    torch.testing.assert_close(predicted, expected)


def check_dropout(rank, libraries, devices, stages):
    fake = pretend(libraries)
    shape = pt.PlanConfig(num_stages=stages, num_microbatches=2)
    settings = config(devices=devices, plan=shape)
    engine = make_engine(
        freeze=schedule(0, 2), dropout=0.5, dtype=torch.float64, config=settings
    )
    data = ToySet(48, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data, 12):
                engine.step(batch)
    fake.synchronize()
    assert fake.violations() == []
    return [p.detach() for p in model_of(engine).parameters()]


def test_dropout_does_not_depend_on_the_devices(libraries):
    runs = [
        run_ranks(check_dropout, 1, libraries, devices, stages)[0]
        for devices, stages in ((NODE[1:2], 1), (NODE, 4), (NODE[:1] * 2, 2))
    ]
    for other in runs[1:]:
        for mine, plain in zip(other, runs[0], strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)


def check_checkpoint(_rank, libraries, devices, folder, epochs):
    fake = pretend(libraries)
    weights = train_on(devices, folder, epochs)
    fake.synchronize()
    assert fake.violations() == []
    return weights


@pytest.mark.parametrize("first", ["host", "device"])
def test_a_checkpoint_goes_on_elsewhere(libraries, tmp_path, first):
    places = {"host": ("cpu", "cpu"), "device": NODE[:2]}
    then = places["device" if first == "host" else "host"]
    moved, plain = str(tmp_path / "moved"), str(tmp_path / "plain")
    run_ranks(check_checkpoint, 1, libraries, places[first], moved, 2)
    (mine,) = run_ranks(check_checkpoint, 1, libraries, then, moved, 4)
    (expected,) = run_ranks(check_checkpoint, 1, libraries, places["host"], plain, 4)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        (("fake:0", "cpu"), "expected devices of one type, got \\['cpu', 'fake'\\]"),
        (("fake:7",), "expected devices that this process sees, 4 of type fake"),
        (("nothing",), "expected names of devices, got 'nothing'"),
        (("fake:0", "fake:1", "fake:1", "fake:0"), None),
        (("fake:0", "fake:0", "fake:1", "fake:2"), "share devices in the same way"),
        (("meta",), "sees, 0 of type meta"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(libraries, devices, problem):
    run_ranks(check_refusal, 1, libraries, devices, problem)


def check_refusal(_rank, libraries, devices, problem):
    pretend(libraries)
    engine = make_engine(freeze=schedule(0), config=config(devices=devices))
    expected = pytest.raises(ValueError, match=problem)
    with contextlib.nullcontext() if problem is None else expected, engine:
        assert run_of(engine).slots.devices[0] == torch.device("fake:0")
