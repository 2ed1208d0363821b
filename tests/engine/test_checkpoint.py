import functools
import io
import logging
import os
import stat

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import tensor_files as files
from pipetransformer.pipe import DeferredBatchNorm
from pipetransformer.state.signature import model_signature
from pipetransformer.transformation import attempts
from tests.engine.scenario import config, make_engine, moments, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

SHRINKING = pt.PlanConfig(slot_memory_bytes=2 * 13_500, reshape="always")


def run_epochs(engine, epochs, *, stop_after=None, size=50):
    """Train; return the losses of the evaluations and the last moments."""
    losses, last = [], None
    with engine:
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(ToySet(size, dtype=torch.float64), 12):
                engine.step(batch)
            test_set = ToySet(21, seed=2, dtype=torch.float64)
            losses.append(engine.evaluate(test_set)["loss"])
            if engine.plan is not None:
                last = moments(engine)
            if epoch == stop_after:
                break
    return losses, last


def engine_in(folder, *, resume=False, plan=None):
    return make_engine(
        freeze=schedule(0, 2, 4, 6),
        dtype=torch.float64,
        config=config(
            plan=plan or pt.PlanConfig(),
            checkpoint=pt.CheckpointConfig(directory=str(folder), resume=resume),
        ),
    )


def resume_on(rank, folder, world):
    plan = SHRINKING if world == 4 else None
    return run_epochs(engine_in(folder, resume=True, plan=plan), 4)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 4])
def test_resume_under_another_plan_continues_the_same_run(world, tmp_path):
    whole = run_ranks(_fresh, 1, tmp_path / "whole", None)[0]
    part = run_ranks(_fresh, 1, tmp_path / "part", 1)[0]
    assert part[0] == pytest.approx(whole[0][:2], rel=1e-9)
    # Left in epoch 1 after its pass, which the end of the run has saved.
    resumed = run_ranks(resume_on, world, tmp_path / "part", world)[0]
    assert resumed[0] == pytest.approx(whole[0][2:], rel=1e-9)
    for a, b in zip(resumed[1]["tensors"], whole[1]["tensors"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def _fresh(rank, folder, stop_after):
    return run_epochs(engine_in(folder), 4, stop_after=stop_after)


def saved(tmp_path, **options):
    path = tmp_path / "saved.pt"
    engine = make_engine(freeze=pt.freeze.Never(), **options)
    with engine:
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)
        engine.save(path)
    return path


def test_checkpoint_is_private_to_its_owner(tmp_path):
    path = saved(tmp_path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["saved.pt"]


def test_checkpoint_of_another_model_is_refused(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="expected 3.up.weight with .*no such tensor"):
        with make_engine(freeze=pt.freeze.Never(), depth=7) as engine:
            engine.load(_without_block(path))
    with pytest.raises(ValueError, match="checkpoint .*expected .* as in this model"):
        with make_engine(freeze=pt.freeze.Never(), depth=3) as engine:
            engine.load(path)


@pytest.mark.parametrize("replace", [torch.optim.SGD, torch.optim.Adagrad])
def test_checkpoint_of_another_optimizer_is_refused(tmp_path, replace):
    path = saved(tmp_path)  # of AdamW
    text = f"expected the state of the optimizer {replace.__name__}, .* got AdamW"
    engine = pt.PipeTransformer(
        toy_model(6),
        optimizer=lambda params: replace(params, lr=0.1),
        loss=torch.nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    )
    with engine, pytest.raises(ValueError, match=text):
        engine.load(path)


@pytest.mark.parametrize("added", [None, torch.optim.lr_scheduler.StepLR])
def test_a_scheduler_may_be_added_or_left_out_at_a_resume(tmp_path, added):
    path = saved(tmp_path) if added is None else saved_alone(tmp_path)
    scheduler = None if added is None else lambda optimizer: added(optimizer, 1)
    with alone(lr_scheduler=scheduler) as engine:
        engine.load(path)
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)
        assert engine.optimizer.param_groups[0]["lr"] > 0


def alone(**options):
    return pt.PipeTransformer(
        toy_model(6),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        units=toy_units(6),
        config=config(),
        **options,
    )


def saved_alone(tmp_path):
    path = tmp_path / "alone.pt"
    with alone() as engine:
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)
        engine.save(path)
    return path


def _without_block(path):
    content = torch.load(path, weights_only=True)
    content["model"] = {
        k: v for k, v in content["model"].items() if not k.startswith("3.up")
    }
    torch.save(content, path)
    return path


@pytest.mark.parametrize("keep", [0, 100, 4000])
def test_torn_checkpoint_is_refused_and_skipped(tmp_path, keep):
    path = saved(tmp_path)
    whole = path.read_bytes()
    newest = tmp_path / "step-0000000009.pt"
    newest.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="checkpoint .* expected a complete file of"):
        checkpoint.read(newest)
    path.rename(tmp_path / "step-0000000003.pt")
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None and found[0].name == "step-0000000003.pt"


def test_file_that_is_no_checkpoint_is_refused(tmp_path):
    torch.save({"weights": [1.0]}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="format 1, got a dict without"):
        checkpoint.read(tmp_path / "other.pt")


def test_checkpoint_does_not_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"format": 1, "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="expected a complete file"):
        checkpoint.read(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = saved(tmp_path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.load(path)
        engine.prepare(ToySet(12), 4)
        with pytest.raises(OSError, match="No space left"):
            engine.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved.pt"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run_epochs(engine_in(tmp_path), 4)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step-0000000015.pt", "step-0000000020.pt"]


def test_the_newest_checkpoint_is_the_last_one_written_by_whatever_clock(tmp_path):
    """Set back by an hour between two epochs: resuming and keeping go by order."""
    hour_ns, plan = 3600 * 10**9, pt.PlanConfig()
    run_epochs(engine_in(tmp_path, plan=plan), 4, stop_after=2)
    for path in tmp_path.iterdir():
        later = path.stat().st_mtime_ns + hour_ns
        os.utime(path, ns=(later, later))
    resumed = engine_in(tmp_path, resume=True)
    run_epochs(resumed, 4)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-0000000015.pt", "step-0000000020.pt"]
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None and found[0].name == names[-1]


def test_a_rank_that_slept_while_others_went_on_does_not_put_its_file_last(tmp_path):
    """It writes its epoch's end when it wakes: resuming must not go back to that."""

    def left(step, before=None):
        path = checkpoint.path_of_step(tmp_path, step)
        time_of = functools.partial(checkpoint.time_in_order, path, before or {})
        files.write(path, {}, stamp=None if before is None else time_of)

    def order():
        return [name[-5:-3] for name in checkpoint.times(tmp_path)]

    left(30)  # of an older run, which went further
    before = checkpoint.times(tmp_path)
    for step in (10, 20):
        left(step, before)
    assert order() == ["20", "10", "30"]
    left(15, before)  # by the rank that slept
    checkpoint.prune(tmp_path, keep=2)
    assert order() == ["20", "15"]


def test_the_file_of_a_rank_that_slept_is_at_no_time_the_newest(tmp_path, monkeypatch):
    """Who kills it, or deletes old files, while the folder is synced, finds order."""
    newest = []

    def look(descriptor, fsync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            newest.append(next(iter(checkpoint.times(tmp_path))))
            checkpoint.prune(tmp_path, keep=1)  # by the others' lead
        fsync(descriptor)

    with engine_in(tmp_path) as engine:
        engine.prepare(ToySet(12, dtype=torch.float64), 4)
        others = checkpoint.path_of_step(tmp_path, 3)
        files.write(others, {})
        monkeypatch.setattr(os, "fsync", look)
        mine = engine._open()
        mine.autosave.after_epoch(mine.replica)
    assert newest == [others.name]
    assert [*tmp_path.iterdir()] == [others]


def test_a_start_that_fails_before_the_first_plan_has_nothing_to_save(
    tmp_path, monkeypatch, caplog
):
    def no_plan(*_, **__):
        raise RuntimeError("no plan")

    monkeypatch.setattr(attempts, "propose", no_plan)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="no plan"):
        with engine_in(tmp_path) as engine:
            engine.prepare(ToySet(12, dtype=torch.float64), 4)
    assert "emergency" not in caplog.text
    assert not [*tmp_path.iterdir()]


def test_older_checkpoint_still_loads(tmp_path):
    path = saved(tmp_path)
    content = torch.load(path, weights_only=True)
    del content["progress"]["pass_nodes"]
    message = torch.load(io.BytesIO(content["optimizer_message"]), weights_only=True)
    for name in ("metrics", "evaluated", "freezes"):
        del message[name]
    packed = io.BytesIO()
    torch.save(message, packed)
    torch.save({**content, "optimizer_message": packed.getvalue()}, path)
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.load(path)
        engine.prepare(ToySet(12), 4)
        assert len(moments(engine)["tensors"]) > 0 and run_of(engine).state.step == 3


def norm_engine(kind=DeferredBatchNorm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), kind(8), nn.Tanh(), nn.Linear(8, 3))
    return model.double(), pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    )


def run_norm_epochs(engine, last, *, load=None, save=None):
    with engine:
        if load is not None:
            engine.load(load)
        for _ in engine.epochs(last):
            for batch in engine.batches(ToySet(24, dtype=torch.float64), 8):
                engine.step(batch)
        if save is not None:
            engine.save(save)


@pytest.mark.parametrize("written_by", ["this version", "the first versions"])
def test_deferred_batch_norm_goes_on_from_a_checkpoint(tmp_path, written_by):
    # Its accumulators were in no checkpoint at first.
    path = tmp_path / "saved.pt"
    whole, engine = norm_engine()
    run_norm_epochs(engine, 2)
    _, engine = norm_engine()
    run_norm_epochs(engine, 1, save=path)
    if written_by == "the first versions":
        content = torch.load(path, weights_only=True)
        content["signature"] = model_signature(norm_engine(nn.BatchNorm1d)[0])
        for name in ("1.sum", "1.sum_squares"):
            del content["model"][name]
        torch.save(content, path)
    model, engine = norm_engine()
    run_norm_epochs(engine, 2, load=path)
    assert model[1].num_batches_tracked == 6
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    checkpoint.export_checkpoint(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    norm_engine()[0].load_state_dict(plain, strict=True)


def test_checkpoint_of_another_batch_norm_is_refused(tmp_path):
    path = tmp_path / "saved.pt"
    run_norm_epochs(norm_engine()[1], 1, save=path)
    with norm_engine(nn.BatchNorm1d)[1] as engine:
        with pytest.raises(ValueError, match="expected 1.sum with no such tensor, as"):
            engine.load(path)


def test_save_before_there_is_an_optimizer_is_refused(tmp_path):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match="save: expected a call after prepare or"):
            engine.save(tmp_path / "early.pt")
    assert not list(tmp_path.iterdir())


def test_checkpoint_without_a_policy_is_refused(tmp_path):
    path = saved(tmp_path)
    content = torch.load(path, weights_only=True)
    del content["extra"]["policy"]
    torch.save(content, path)
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(
            ValueError, match="expected a freeze policy's state, got no"
        ):
            engine.load(path)


def test_emergency_takes_the_place_of_another_runs_file_only(tmp_path):
    with make_engine(
        freeze=pt.freeze.Never(),
        config=config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path))),
    ) as engine:
        engine.prepare(ToySet(12), 4)
        coordinator = engine._open()
        path = checkpoint.path_of_step(tmp_path, 0)
        engine.save(path)
        own = path.read_bytes()
        coordinator.autosave.in_emergency(coordinator.replica, lead=False)
        assert path.read_bytes() == own, "the lead's is kept"
        content = checkpoint.read(path)
        content["extra"]["run_id"] = "another"
        torch.save(content, path)
        coordinator.autosave.in_emergency(coordinator.replica, lead=False)
        assert checkpoint.read(path)["extra"]["run_id"] == run_of(engine).info.run_id


def test_load_after_the_first_pass_is_refused(tmp_path):
    path = saved(tmp_path)
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.prepare(ToySet(12), 4)
        with pytest.raises(ValueError, match="load: expected a call before the first"):
            engine.load(path)


def load_where_it_is(rank, folder):
    """Load a checkpoint that only the lead can read, and train on."""
    engine = make_engine(freeze=pt.freeze.Never())
    with engine:
        engine.load(folder / ("saved.pt" if rank == 0 else "not here.pt"))
        engine.prepare(ToySet(12), 4)
        run = run_of(engine)
        return run.state.step, run.is_resumed, tensors_of_model(engine)


def tensors_of_model(engine):
    return [p.detach().clone() for p in run_of(engine).arguments.model.parameters()]


@pytest.mark.distributed
def test_the_lead_alone_reads_a_checkpoint(tmp_path):
    saved(tmp_path)
    first, second = run_ranks(load_where_it_is, 2, tmp_path)
    assert first[:2] == second[:2] == (3, True)
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
