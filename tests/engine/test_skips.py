"""Models of skippable layers train in the engine as they do in a plain loop."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import record_bytes
from pipetransformer.data.sampler import ElasticSampler
from pipetransformer.pipe import Workers
from pipetransformer.pipe.skip import skippable
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock
from pipetransformer.skip.tracker import current_skip_tracker
from tests.engine.scenario import config, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.skip_model import BOUNDARIES, NUM_LAYERS, PAIRS, skip_model
from tests.support.toy import ToySet

ROWS, BATCH, SEED = 50, 12, 3
# Units asked for by epoch, one layer each, and where the boundary then lies: layers 4
# and 5 cannot freeze without what belongs to them, so the boundary waits at 3.
WANTED, HELD = (0, 5, 7, 12, 0), (0, 3, 7, 12, 0)
# Processes: how the plans are made, and the K that follow.
WORLDS = {
    1: (pt.PlanConfig(num_stages=3), (3, 3, 3, 1, 3)),
    2: (pt.PlanConfig(slot_memory_bytes=50_000, reshape="always"), (2, 2, 1, 1, 2)),
    3: (pt.PlanConfig(num_stages=3), (3, 3, 3, 1, 3)),
    4: (pt.PlanConfig(slot_memory_bytes=30_000, reshape="always"), (4, 4, 2, 1, 4)),
}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)


def skip_engine(*, freeze, optimizer=adamw, **settings):
    return pt.PipeTransformer(
        skip_model(dtype=torch.float64),
        optimizer=optimizer,
        lr_scheduler=step_lr,
        loss=nn.CrossEntropyLoss(),
        freeze=freeze,
        config=config(seed=SEED, **settings),
    )


def training_set():
    return ToySet(ROWS, dtype=torch.float64)


def held_out_set():
    return ToySet(21, seed=2, dtype=torch.float64)


def gradients_of(parameters):
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def batches_of(epoch):
    sampler = ElasticSampler(ROWS, BATCH, seed=SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.fixture(scope="module")
def plain():
    """One process, no engine: losses, gradients and weights with the same freezes."""
    model = skip_model(dtype=torch.float64)
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    scheduler = step_lr(optimizer)
    data, held_out = training_set(), held_out_set()
    losses, gradients, evaluated = [], [], []
    for epoch, boundary in enumerate(HELD):
        for index, layer in enumerate(model):
            layer.requires_grad_(index >= boundary)
        for ids in batches_of(epoch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.x[ids]), data.y[ids])
            loss.backward()
            losses.append(loss.item())
            gradients.append(gradients_of(parameters))
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            outputs = model(held_out.x)
            evaluated.append(nn.functional.cross_entropy(outputs, held_out.y).item())
    return losses, gradients, evaluated, [p.detach() for p in parameters]


def train(rank, settings):
    """Train on one rank; return what each step and each epoch gave."""
    torch.manual_seed(rank)  # ranks must not need equal global generators
    gradients, losses, evaluated = {}, {}, []

    def watched(parameters):
        def note(*_):
            step = run_of(engine).state.step
            gradients[step] = gradients_of(model_of(engine).parameters())

        optimizer = adamw(parameters)
        optimizer.register_step_pre_hook(note)
        return optimizer

    engine = skip_engine(freeze=schedule(*WANTED), optimizer=watched, **settings)
    data, held_out = training_set(), held_out_set()
    plans = []
    with engine:
        for _ in engine.epochs(len(WANTED)):
            for batch in engine.batches(data, BATCH):
                step = run_of(engine).state.step
                losses[step] = engine.step(batch).item() * batch.rows
            evaluated.append(engine.evaluate(held_out)["loss"])
            plans.append(engine.plan)
    return {
        "gradients": gradients,
        "losses": losses,
        "evaluated": evaluated,
        "plans": plans,
        "history": engine.history.to_json(),
        "weights": [p.detach().clone() for p in model_of(engine).parameters()],
    }


def close(a, b):
    if a is None or b is None:
        return a is b
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    return True


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(n, marks=pytest.mark.distributed) for n in (2, 3, 4))]
)
def test_model_with_skips_trains_elastically_as_a_plain_loop(world, plain):
    plan, stages = WORLDS[world]
    settings = {"plan": plan, "pipe": pt.PipeConfig(num_slots=3)}
    results = run_ranks(train, world, settings, timeout_s=110)
    lead = results[0]
    assert tuple(p.num_stages for p in lead["plans"]) == stages
    assert tuple(p.boundary for p in lead["plans"]) == HELD
    cuts = {cut for p in lead["plans"] for cut in p.cuts[1:-1]}
    assert any(a < cut <= b for cut in cuts for a, b in PAIRS), "a skip is carried"

    losses, gradients, evaluated, weights = plain
    rows = [len(ids) for epoch in range(len(HELD)) for ids in batches_of(epoch)]
    for step, (loss, expected) in enumerate(zip(losses, gradients, strict=True)):
        total = sum(result["losses"].get(step, 0.0) for result in results)
        assert total / rows[step] == pytest.approx(loss, rel=1e-10, abs=1e-12)
        found = lead["gradients"][step]
        assert all(map(close, found, expected)), f"step {step}"
    assert lead["evaluated"] == pytest.approx(evaluated, rel=1e-10, abs=1e-12)
    assert all(map(close, lead["weights"], weights))

    # A record at an earlier boundary is a hit too: the pairs behind it run.
    served = [(e["cache_hits"], e["cache_misses"]) for e in lead["history"]["epochs"]]
    assert served == [(0, 0), (0, ROWS), (ROWS, 0), (ROWS, 0), (0, 0)]


def first_gradients(cuts, checkpoint):
    engine = skip_engine(
        freeze=pt.freeze.Never(),
        plan=pt.PlanConfig(cuts=cuts, num_microbatches=4),
        pipe=pt.PipeConfig(num_slots=len(cuts) - 1, checkpoint=checkpoint),
    )
    with engine:
        batch = next(engine.batches(training_set(), BATCH))
        loss = engine.loss(batch)
        engine.backward(loss)
        assert engine.plan.cuts == cuts
        return loss.item(), gradients_of(model_of(engine).parameters())


CUTS = [(0, cut, NUM_LAYERS) for cut in range(1, NUM_LAYERS)]
CUTS += [(0, 2, 5, 9, NUM_LAYERS), tuple(range(NUM_LAYERS + 1))]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_skips_are_carried_over_every_forced_cut(cuts, plain):
    loss, gradients = first_gradients(cuts, "never")
    assert loss == pytest.approx(plain[0][0], rel=1e-12)
    assert all(map(close, gradients, plain[1][0]))


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
def test_skips_are_carried_to_cells_that_run_again(checkpoint, plain):
    loss, gradients = first_gradients((0, 2, 5, 9, NUM_LAYERS), checkpoint)
    assert loss == pytest.approx(plain[0][0], rel=1e-12)
    assert all(map(close, gradients, plain[1][0]))


def test_cached_and_computed_prefixes_give_the_same_losses():
    def run(cache):
        engine = skip_engine(
            freeze=schedule(3, 7, 12, 12),
            cache=pt.CacheConfig(enabled=cache),
            plan=pt.PlanConfig(num_microbatches=1),
        )
        losses = []
        with engine:
            for _ in engine.epochs(4):
                for batch in engine.batches(training_set(), BATCH):
                    losses.append(engine.step(batch).item())
        return losses, sum(e.cache_hits for e in engine.history.epochs)

    (cached, hits), (computed, none) = run(True), run(False)
    assert cached == pytest.approx(computed, rel=1e-12)
    assert (hits, none) == (3 * ROWS, 0)


def test_records_are_as_wide_as_a_boundary_not_as_its_skips():
    engine = skip_engine(freeze=schedule(0))
    with engine:
        engine.prepare(training_set(), BATCH)
        run = run_of(engine)
        wide = [layer.boundary_bytes_per_sample for layer in run.inputs.profile.layers]
        assert max(wide) == 192 and max(wide[b - 1] for b in BOUNDARIES[1:]) == 64
        assert run.caches._slot_bytes("train") == record_bytes(
            [torch.empty(1, 64 + 256, dtype=torch.uint8)]
        )


def test_run_with_skips_resumes_and_leaves_as_the_plain_model(tmp_path):
    def run(epochs, resume):
        engine = skip_engine(
            freeze=schedule(*WANTED),
            plan=pt.PlanConfig(num_stages=3),
            pipe=pt.PipeConfig(num_slots=3),
            checkpoint=pt.CheckpointConfig(directory=tmp_path / "c", resume=resume),
        )
        with engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(training_set(), BATCH):
                    engine.step(batch)
            return engine.state_dict(), engine.history.freezes

    run(3, False)
    resumed, freezes = run(5, True)
    assert [entry["boundary"] for entry in freezes] == [0, 3, 7, 12, 0]
    whole, _ = run(5, False)
    model = skip_model(dtype=torch.float64)
    assert list(resumed) == list(model.state_dict())
    model.load_state_dict(resumed)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-10, atol=1e-12)


def test_plan_of_a_model_with_skips_is_explained():
    engine = skip_engine(freeze=schedule(0, 7))
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(training_set(), BATCH):
                engine.step(batch)
        explanation = engine.explain().to_dict()
    assert explanation["plan"]["boundary"] == 7


@pytest.mark.parametrize("lost", [1, 2])
def test_half_a_pair_is_refused_when_the_engine_is_made(lost):
    layers = list(skip_model())
    layers[lost] = nn.Identity()
    with pytest.raises(TypeError, match="skips: expected each name stashed once and"):
        pt.PipeTransformer(
            nn.Sequential(*layers),
            optimizer=adamw,
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Never(),
        )


@skippable(pop="skip")
class Fails(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError


def test_frozen_layer_that_fails_leaves_no_skip_in_the_thread():
    layers = list(skip_model())[:2]
    with Workers(1, intra_op_threads=1) as workers:
        failing = [*layers, Fails().eval()]
        prefix = FrozenPrefix(failing, 3, workers, Clock(), seed=0)
        before = len(current_skip_tracker())
        with pytest.raises(ZeroDivisionError):
            prefix(lambda: torch.zeros(4, 4), None, None, position=DrawPosition(0, 0))
    assert len(current_skip_tracker()) == before
