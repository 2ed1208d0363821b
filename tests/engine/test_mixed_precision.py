"""`Config.amp`: what an autocast region around each call gives, and fp16's scale."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config, equal, is_active, moments, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

SAMPLES, BATCH = 50, 12
ALONE = pt.PlanConfig(num_stages=1, num_microbatches=1)
ONE_THREAD = pt.PipeConfig(threads_per_stage=1)


def engine_of(*, model=None, freeze=None, loss=None, policy=None, **settings):
    return pt.PipeTransformer(
        model or toy_model(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.9),
        loss=loss or nn.CrossEntropyLoss(),
        freeze=policy or freeze or schedule(0),
        units=None if model is not None else toy_units(),
        config=config(**settings),
    )


def train(amp, *, around=False, frozen=(0,), epochs=2, **settings):
    """Train; return losses, evaluations and the moments at the end."""
    engine = engine_of(amp=amp, freeze=schedule(*frozen), **settings)
    region = torch.autocast("cpu", torch.bfloat16, enabled=around)
    losses, evaluations = [], []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(SAMPLES), BATCH):
                with region:
                    losses.append(engine.step(batch))
            with region:
                evaluations.append(engine.evaluate(ToySet(21, seed=2))["loss"])
        return losses, evaluations, moments(engine)


@pytest.mark.parametrize("stages, microbatches", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("frozen", [(0,), (0, 2)])
def test_bf16_equals_an_autocast_region_around_each_call(stages, microbatches, frozen):
    settings = {
        "frozen": frozen,
        "pipe": pt.PipeConfig(num_slots=stages),
        "plan": pt.PlanConfig(num_stages=stages, num_microbatches=microbatches),
    }
    losses, evaluations, own = train("bf16", **settings)
    wanted_losses, wanted, other = train(None, around=True, **settings)
    assert equal(losses, wanted_losses) and evaluations == wanted
    assert equal(own["weights"], other["weights"])
    plain_losses, plain, _ = train(None, **settings)
    assert not equal(losses, plain_losses) and evaluations != plain
    assert all(weight.dtype == torch.float32 for weight in own["weights"])


def test_fp16_equals_a_plain_loop_with_a_scaler():
    order = []
    engine = engine_of(amp="fp16", clip_grad_norm=0.5, plan=ALONE, pipe=ONE_THREAD)
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(SAMPLES), BATCH):
                engine.step(batch)
                order.append(batch.ids)
        own, scale = moments(engine), run_of(engine).state.scaler.get_scale()
    model, data = toy_model(), ToySet(SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    scaler = torch.amp.GradScaler("cpu")
    for ids in order:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(data.x[ids]), data.y[ids])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scale_before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == scale_before:
            scheduler.step()
        optimizer.zero_grad()
    assert scale == scaler.get_scale()
    assert own["scheduler"] == scheduler.last_epoch
    for a, b in zip(own["weights"], model.parameters(), strict=True):
        assert torch.equal(a, b.detach())


class Overflows(nn.Module):
    """Cross entropy whose gradients are Inf where the test says so."""

    def __init__(self):
        super().__init__()
        self.calls, self.at = 0, ()

    def forward(self, outputs, targets):
        self.calls += 1
        loss = nn.functional.cross_entropy(outputs, targets)
        if self.calls in self.at:
            loss = loss + (outputs * torch.inf).nan_to_num(0, 0, 0).sum()
        return loss


class Observed(pt.freeze.Manual):
    """Keeps what it was shown of the gradients."""

    needs = frozenset({"gradient_norms"})
    shown = ()

    def observe(self, statistics):
        self.shown = (*self.shown, statistics.gradient_norms)


def test_a_step_whose_gradients_overflow_changes_nothing_but_the_scale():
    loss = Overflows()
    policy = Observed()
    engine = engine_of(amp="fp16", loss=loss, policy=policy, check_loss=False)
    seen = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(SAMPLES), BATCH):
                if len(seen) == 3:
                    loss.at = (loss.calls + 1,)
                before = moments(engine)
                engine.step(batch)
                scaler = run_of(engine).state.scaler
                seen.append((before, moments(engine), scaler.get_scale()))
    before, after, scale = seen[3]
    assert equal(before["weights"], after["weights"])
    assert equal(before["tensors"], after["tensors"])
    assert scale == seen[2][2] / 2
    assert after["step"] == before["step"] + 1, "the batch is done"
    assert after["scheduler"] == before["scheduler"]
    assert not equal(seen[4][0]["weights"], seen[4][1]["weights"])
    records = engine.history.to_json()["epochs"]
    assert [e["unique_samples"] for e in records] == [SAMPLES, SAMPLES]
    assert [e["optimizer_steps"] for e in records] == [5, 5]
    assert policy.shown and torch.tensor(policy.shown).isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflows_keeps_the_rate_whoever_skips_it(fused):
    loss = Overflows()
    loss.at = (2,)
    engine = pt.PipeTransformer(
        toy_model(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=fused),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
        loss=loss,
        freeze=pt.freeze.Never(),
        config=config(amp="fp16", check_loss=False, plan=ALONE),
    )
    rates, steps = [], []
    with engine:
        for batch in engine.batches(ToySet(SAMPLES), BATCH):
            engine.step(batch)
            rates.append(engine.optimizer.param_groups[0]["lr"])
            steps.append(run_of(engine).state.step)
    assert rates == [0.005, 0.005, 0.0025, 0.00125, 0.000625]
    assert steps == [1, 2, 3, 4, 5]


def train_elastically(rank, folder, save_at):
    """Train under plans that change; return the scale after each step."""
    engine = engine_of(
        amp="fp16",
        freeze=schedule(0, 6, 2),
        plan=pt.PlanConfig(slot_memory_bytes=20_000, reshape="always"),
    )
    scales, resumed = {}, None
    with engine:
        if save_at is None:
            engine.load(folder / "scaled.pt")
        for epoch in engine.epochs(3):
            for batch in engine.batches(ToySet(SAMPLES), BATCH):
                scaler, step = run_of(engine).state.scaler, run_of(engine).state.step
                if epoch == 0 and batch.index == 0 and save_at is not None:
                    # As far from what a new rank begins with as can be.
                    scaler.load_state_dict(
                        {**scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 7}
                    )
                if save_at is None and resumed is None:
                    resumed = scaler.state_dict()
                if step == save_at:
                    engine.save(folder / "scaled.pt")
                engine.step(batch)
                scales[step + 1] = scaler.state_dict()
        last = moments(engine) if is_active(engine) else None
    return scales, resumed, last, engine.history.to_json()


@pytest.mark.distributed
def test_the_scale_goes_with_every_change_of_plan_and_into_checkpoints(tmp_path):
    results = run_ranks(train_elastically, 4, tmp_path, 7)
    assert len(results[0][3]["transformations"]) >= 2
    wanted = results[0][0]
    assert wanted[15]["scale"] == 1024.0 and wanted[15]["_growth_tracker"] == 22
    for scales, *_ in results:
        assert scales == {step: wanted[step] for step in scales}
    assert any(len(scales) < len(wanted) for scales, *_ in results), "nobody joined"
    again = run_ranks(train_elastically, 4, tmp_path, None)
    assert again[0][1]["_growth_tracker"] == 14
    assert again[0][0] == {step: s for step, s in wanted.items() if step > 7}
    assert equal(again[0][2]["weights"], results[0][2]["weights"])


def test_a_loop_of_ones_own_equals_the_engines():
    def run(own):
        engine = engine_of(amp="fp16", clip_grad_norm=0.5)
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(SAMPLES), BATCH):
                    if own:
                        engine.backward(engine.loss(batch))
                        engine.update()
                    else:
                        engine.step(batch)
            return moments(engine), engine.history.to_json()["epochs"]

    (one, records), (other, wanted) = run(True), run(False)
    assert equal(one["weights"], other["weights"])
    assert one["scheduler"] == other["scheduler"]
    for record, theirs in zip(records, wanted, strict=True):
        assert record["train_loss"] == theirs["train_loss"]
        assert record["unique_samples"] == SAMPLES


def test_an_optimizer_step_with_scaled_gradients_is_refused():
    engine = engine_of(amp="fp16")
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(SAMPLES), BATCH):
                engine.backward(engine.loss(batch))
                before = [p.detach().clone() for p in model_of(engine).parameters()]
                with pytest.raises(RuntimeError, match=r"expected engine.update\(\)"):
                    engine.optimizer.step()
                break
        assert equal(before, [p.detach() for p in model_of(engine).parameters()])


def test_weights_in_fp16_are_refused_with_a_scale():
    with pytest.raises(ValueError, match="amp"):
        engine_of(model=toy_model().half(), amp="fp16")


@pytest.mark.parametrize("value", ["fp8", "float16", True])
def test_another_precision_is_refused(value):
    with pytest.raises((ValueError, TypeError), match="Config.amp"):
        config(amp=value)
