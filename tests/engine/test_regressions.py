"""Past bugs, each named by its cause."""

import os
import resource
import time
from datetime import timedelta

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy, toy_model


def engine_of(model, *, freeze=None, **options):
    return pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        loss=options.pop("loss", nn.CrossEntropyLoss()),
        freeze=freeze or schedule(0),
        config=config(**options),
    )


def with_batch_norm(rank):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        )
    engine = engine_of(model, freeze=schedule(0, 2, 2, 2))
    losses = []
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
            losses.append(engine.evaluate(ToySet(20, seed=2))["loss"])
    hits = [e.cache_hits for e in engine.history.epochs]
    return losses, [b.clone() for b in model.buffers()], hits


@pytest.mark.distributed
def test_frozen_running_statistics_are_those_of_replica_0():
    # DDP sends buffers before a forward only: after the last step of an epoch each
    # replica kept its own, and froze with them.
    first, second = run_ranks(with_batch_norm, 2)
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))
    assert first[2] == [0, 0, 48, 48]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_active_layers_may_begin_with_one_that_works_in_place(num_stages, cached):
    # Micro-batches are rows of one tensor: with two of them autograd refused what the
    # first had saved, in the first pass whose frozen layers end before such a layer.
    data = ToySet(48, dtype=torch.float64, vouch=True)

    def trained(num_microbatches, in_place):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(4, 8),
                nn.LeakyReLU(0.3, inplace=in_place),
                nn.Linear(8, 8),
                nn.LeakyReLU(0.3, inplace=in_place),
                nn.Linear(8, 3),
            ).double()
        losses = []
        settings = {
            "plan": pt.PlanConfig(
                num_stages=num_stages, num_microbatches=num_microbatches
            ),
            "pipe": pt.PipeConfig(num_slots=num_stages),
            "cache": pt.CacheConfig(enabled=cached),
        }
        with engine_of(model, freeze=schedule(0, 1, 3, 3), **settings) as engine:
            for _ in engine.epochs(4):
                for batch in engine.batches(data, 12):
                    losses.append(float(engine.step(batch)))
            epochs = engine.history.to_json()["epochs"]
        assert [each["boundary"] for each in epochs] == [0, 1, 3, 3]
        assert (epochs[-1]["cache_hits"] > 0) == cached
        return losses

    expected = trained(1, in_place=False)
    assert expected[-1] < expected[0]
    for count in (1, 3):
        found = trained(count, in_place=True)
        assert found == pytest.approx(expected, rel=1e-12)


def test_evaluation_inside_the_batch_loop_leaves_the_pass_open():
    engine = make_engine(freeze=schedule(0))
    with engine:
        for _ in engine.epochs(1):
            for number, batch in enumerate(engine.batches(ToySet(24), 4)):
                engine.step(batch)
                if number == 1:
                    engine.evaluate(ToySet(8))
    (record,) = engine.history.epochs
    assert (record.samples, record.optimizer_steps) == (24, 6)


def evaluate_mid_pass(rank):
    settings = config(plan=pt.PlanConfig(max_replicas=1))
    engine = make_engine(freeze=schedule(0), config=settings)
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
                engine.evaluate(ToySet(8))
            loss = engine.evaluate(ToySet(8))["loss"]
    return loss


@pytest.mark.distributed
def test_evaluation_inside_the_batch_loop_does_not_confuse_a_standby():
    losses = run_ranks(evaluate_mid_pass, 2)
    assert losses[0] == losses[1]


def poison(rank, folder):
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        value = nn.functional.cross_entropy(outputs, targets)
        if rank == 1 and len(calls) == 3:
            with torch.no_grad():
                model_of(engine)[0].weight.fill_(float("nan"))
            return value * float("nan")
        return value

    settings = config(
        check_loss=False,  # which would call it once more
        checkpoint=pt.CheckpointConfig(directory=str(folder)),
    )
    engine = make_engine(freeze=schedule(0), loss=loss, config=settings)
    try:
        with engine:
            for _ in engine.epochs(1):
                for batch in engine.batches(ToySet(48), 12):
                    engine.step(batch)
    except (FloatingPointError, pt.PeerFailure) as error:
        return type(error).__name__, str(error)


@pytest.mark.distributed
def test_nan_on_one_replica_stops_all_and_saves_no_nan(tmp_path):
    first, second = run_ranks(poison, 2, tmp_path)
    assert second[0] == "FloatingPointError"
    assert first[0] == "PeerFailure"
    assert "expected a finite value, got nan at step 2 on rank 1" in first[1]
    for path in tmp_path.glob("step-*.pt"):
        weights = checkpoint.read(path)["model"].values()
        assert all(bool(value.isfinite().all()) for value in weights)


def test_users_runtime_error_is_no_peer_failure():
    engine = engine_of(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        with engine:
            engine.prepare(ToySet(8), 4)
    assert not isinstance(caught.value, pt.PeerFailure)


def test_full_disk_in_the_emergency_checkpoint_keeps_the_users_error(tmp_path, caplog):
    settings = config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path)))
    engine = make_engine(freeze=schedule(0), config=settings)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(KeyError, match="mine"):
            with engine:
                for batch in engine.batches(ToySet(8), 4):
                    engine.step(batch)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
                    raise KeyError("mine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "emergency checkpoint" in caplog.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("behind", [False, True])
def test_an_emergency_checkpoint_tells_what_does_not_come_again(
    behind, tmp_path, caplog
):
    settings = config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path)))
    engine = make_engine(freeze=schedule(0), config=settings)
    with pytest.raises(KeyError, match="mine"):
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(8), 4):
                    engine.step(batch)
                    if not behind:
                        raise KeyError("mine")
                raise KeyError("mine")
    assert "emergency checkpoint" in caplog.text
    told = "all batches of epoch 0 are done: a run that goes on from there begins with"
    assert (told in caplog.text) == behind


def test_users_own_loop_counts_steps_draws_and_samples():
    engine = make_engine(freeze=schedule(0), dropout=0.5)
    outputs = []
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(12), 4):
                with torch.no_grad():
                    outputs.append(engine.model(torch.ones(64, 4)))
                engine.backward(engine.loss(batch))
                engine.optimizer.step()
                engine.scheduler.step()
                engine.optimizer.zero_grad()
    (record,) = engine.history.epochs
    assert (record.samples, record.optimizer_steps) == (12, 3)
    zeros = [(o - o.mean(0)).sign() for o in outputs]
    assert not torch.equal(zeros[0], zeros[1]), "every step drew the same masks"


def own_loop_with_an_empty_share(rank):
    engine = make_engine(freeze=schedule(0))
    seen = []
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(13), 4):
                engine.backward(engine.loss(batch))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                seen.append(batch.rows)
    return seen, [p.detach().clone() for p in model_of(engine).parameters()]


@pytest.mark.distributed
def test_users_own_loop_works_on_a_replica_without_rows():
    first, second = run_ranks(own_loop_with_an_empty_share, 2)
    assert sorted((first[0][-1], second[0][-1])) == [0, 1]
    assert all(map(torch.equal, first[1], second[1]))


def test_second_pass_in_an_epoch_is_refused_and_not_empty():
    engine = make_engine(freeze=schedule(0))
    with pytest.raises(ValueError, match="expected one pass per epoch, got a second"):
        with engine:
            for _ in range(2):
                for batch in engine.batches(ToySet(8), 4):
                    engine.step(batch)


def stop_in_the_middle(folder, batch_size=4, stop=None, resume=False, seed=3):
    settings = config(
        seed=seed,
        plan=pt.PlanConfig(num_microbatches=1),
        checkpoint=pt.CheckpointConfig(directory=str(folder), resume=resume),
    )
    engine = make_engine(freeze=schedule(0), dtype=torch.float64, config=settings)
    seen = []
    with engine:
        for _ in engine.epochs(2):
            for number, batch in enumerate(
                engine.batches(ToySet(24, dtype=torch.float64), batch_size)
            ):
                if number == stop:
                    raise KeyError("stop")
                engine.step(batch)
                seen.extend(batch.ids.tolist())
    return seen, [p.detach().clone() for p in model_of(engine).parameters()]


def test_resume_in_the_middle_of_an_epoch_goes_on_with_the_next_batch(tmp_path):
    whole = stop_in_the_middle(tmp_path / "whole")
    with pytest.raises(KeyError):
        stop_in_the_middle(tmp_path / "part", stop=2)
    seen, weights = stop_in_the_middle(tmp_path / "part", resume=True)
    assert seen == whole[0][8:]
    assert all(map(torch.equal, weights, whole[1]))


@pytest.mark.parametrize("change", [{"batch_size": 8}, {"seed": 4}])
def test_resume_in_the_middle_of_an_epoch_refuses_other_batches(change, tmp_path):
    with pytest.raises(KeyError):
        stop_in_the_middle(tmp_path, stop=2)
    with pytest.raises(ValueError, match="from the middle of an epoch: expected the"):
        stop_in_the_middle(tmp_path, resume=True, **change)


def test_save_after_the_last_batch_resumes_with_the_next_epoch(tmp_path):
    engine = make_engine(freeze=schedule(0))
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
            engine.save(tmp_path / "saved.pt")
    progress = checkpoint.read(tmp_path / "saved.pt")["progress"]
    assert (progress["epoch"], progress["batch"]) == (1, 0)


class PassesMore(nn.Module):
    def forward(self, x):
        return x, 3.0, None


class TakesMore(nn.Module):
    def forward(self, x, factor, nothing):
        assert nothing is None
        return x * factor


@pytest.mark.parametrize("stages", [1, 2])
def test_boundary_values_that_are_no_tensors_survive_freezing(stages):
    model = nn.Sequential(
        nn.Linear(4, 8), PassesMore(), TakesMore(), nn.Tanh(), nn.Linear(8, 3)
    )
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 2, 2),
        config=config(
            plan=pt.PlanConfig(num_stages=stages), pipe=pt.PipeConfig(num_slots=stages)
        ),
    )
    with engine:
        losses = []
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
            losses.append(engine.evaluate(ToySet(16))["loss"])
    assert losses[1:] == pytest.approx(losses[:-1], rel=1e-6)
    assert engine.history.cache[-1]["hits"] == 8


def test_changed_frozen_weights_are_seen_by_the_next_evaluation():
    engine = make_engine(freeze=schedule(3))
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
        before = engine.evaluate(ToySet(8))["loss"]
        with torch.no_grad():
            model_of(engine)[1].down.weight.mul_(3)
        assert engine.evaluate(ToySet(8))["loss"] != before


def test_a_second_larger_evaluation_set_of_one_name_is_not_cached(caplog):
    engine = make_engine(freeze=schedule(2))
    with engine:
        engine.prepare(ToySet(8), 4)
        engine.evaluate(ToySet(8))
        engine.evaluate(ToySet(20), {"accuracy": accuracy})
    assert "give each set its own name" in caplog.text


def test_older_runs_checkpoints_do_not_outlive_newer_ones(tmp_path):
    for name in ("step-0000000009.pt", "step-0000000012.pt"):
        (tmp_path / name).write_bytes(b"old")
        os.utime(tmp_path / name, (1, 1))
    settings = config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path)))
    with make_engine(freeze=schedule(0), config=settings) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-0000000002.pt", "step-0000000004.pt"]


def come_late(rank):
    quick = pt.AutoDPConfig(
        heartbeat_interval=config().autodp.heartbeat_interval,
        heartbeat_timeout=config().autodp.heartbeat_timeout,
        protocol_timeout=timedelta(seconds=5),
    )
    with make_engine(freeze=schedule(0), config=config(autodp=quick)) as engine:
        if rank == 1:
            time.sleep(6)  # longer than the protocol's deadline
        for batch in engine.batches(ToySet(8), 4):
            engine.step(batch)
    return "trained"


@pytest.mark.distributed
def test_a_rank_that_comes_late_to_the_first_pass_is_waited_for():
    assert run_ranks(come_late, 2) == ["trained"] * 2


def test_forced_cuts_with_a_policy_that_freezes_are_refused():
    with pytest.raises(ValueError, match="PlanConfig.cuts: expected None with a pol"):
        make_engine(
            freeze=schedule(0, 2), config=config(plan=pt.PlanConfig(cuts=(0, 4, 8)))
        )


def test_boundary_stops_before_nothing_is_left_to_train():
    model = toy_model(3)
    for layer in model[2:]:
        layer.requires_grad_(False)
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 4),
        config=config(),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
    assert engine.history.epochs[-1].shape.boundary == 1


def test_a_policy_serves_one_engine():
    policy = schedule(0)
    make_engine(freeze=policy)
    with pytest.raises(ValueError, match="policy: expected a new one"):
        make_engine(freeze=policy)


def one_replica_on_two_nodes(rank):
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=str(rank))
    settings = config(plan=pt.PlanConfig(max_replicas=1))
    engine = make_engine(freeze=schedule(0), config=settings)
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
        nodes = engine._session.run.info.num_nodes
    return nodes, [e.unique_samples for e in engine.history.epochs]


@pytest.mark.distributed
def test_nodes_without_a_replica_own_no_samples():
    first, _ = run_ranks(one_replica_on_two_nodes, 2)
    assert first == (2, [48])


def frozen_counts(folder, *, stop=None, resume=False):
    settings = config(
        plan=pt.PlanConfig(num_microbatches=1),
        checkpoint=pt.CheckpointConfig(directory=str(folder), resume=resume),
    )
    policy = pt.freeze.AlphaCap(1 / 3, gradient_term=True)
    engine = make_engine(freeze=policy, config=settings)
    with engine:
        for epoch in engine.epochs(5):
            if epoch == stop:
                break
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    return [e.shape.num_frozen_layers for e in engine.history.epochs]


def test_resume_takes_the_freeze_decision_that_the_statistics_gave(tmp_path):
    whole = frozen_counts(tmp_path / "whole")
    assert frozen_counts(tmp_path / "part", stop=1) == whole[:1]
    assert frozen_counts(tmp_path / "part", resume=True) == whole[1:]
