"""Checkpoints within a pass: the resumed run is the one that was not interrupted."""

import dataclasses
import os
import shutil

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from tests.engine.scenario import config, make_engine, moments, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy

EPOCHS = 4  # of 5 batches, the last one short


def settings(folder, *, resume=False, freeze_every=None, **changes):
    wanted = {"every_steps": 3, "every_epochs": 100, "keep": 100, **changes}
    return config(
        freeze_every=freeze_every,
        # Other sizes of what is computed at once give other bits: micro-batches, and
        # the rows of a batch whose frozen activations are not cached.
        plan=pt.PlanConfig(num_microbatches=1),
        cache=pt.CacheConfig(enabled=False),
        checkpoint=pt.CheckpointConfig(directory=str(folder), resume=resume, **wanted),
    )


class AccurateEnough(pt.freeze.Policy):
    """Freezes as many units as there are correct answers out of five."""

    def _choose(self, progress, statistics):
        return int(5 * progress.metrics.get("accuracy", 0.0))


def train(engine):
    """Return (step, ids, loss) of every step, and the state at the end."""
    steps = []
    with engine:
        for _ in engine.epochs(EPOCHS):
            for batch in engine.batches(ToySet(50), 12):
                at = run_of(engine).state.step
                steps.append((at, batch.ids.tolist(), float(engine.step(batch))))
            engine.evaluate(ToySet(21, seed=2), {"accuracy": accuracy})
        end = moments(engine)
        end["freezes"] = run_of(engine).state.freezes
    return steps, end


def policies():
    """Return (policy, optimizer steps between decisions or None) by name."""
    return {
        "schedule": (schedule(0, 2, 4, 5), None),
        "gradients": (pt.freeze.AlphaCap(1 / 3, gradient_term=True), None),
        "gradients, within passes": (pt.freeze.AlphaCap(1 / 3, gradient_term=True), 4),
        "metrics": (AccurateEnough(), None),
        "losses": (pt.freeze.Guarded(stake=0.95), None),
        "losses, within passes": (pt.freeze.Guarded(stake=0.95), 4),
    }


@pytest.mark.parametrize("name", policies())
def test_resumed_run_repeats_the_rest_of_the_whole_one_bitwise(name, tmp_path):
    def engine(folder, **options):
        policy, every = policies()[name]
        return make_engine(
            freeze=policy,
            dropout=0.1,
            config=settings(folder, freeze_every=every, **options),
        )

    whole, end = train(engine(tmp_path / "whole"))
    found = sorted(p.name for p in (tmp_path / "whole").iterdir())
    # Step 15 falls on the end of a pass, and 20 is the end of the run.
    assert found == [f"step-{step:010d}.pt" for step in (3, 6, 9, 12, 15, 18, 20)]
    assert len(end["freezes"]) > 1, "nothing was frozen"
    for step in (3, 9, 15):
        folder = tmp_path / str(step)
        folder.mkdir()
        shutil.copy(checkpoint.path_of_step(tmp_path / "whole", step), folder)
        rest, rest_end = train(engine(folder, resume=True))
        assert rest == whole[step:]
        for part in ("weights", "tensors"):
            pairs = zip(rest_end[part], end[part], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        for part in ("rates", "step", "scheduler", "freezes"):
            assert rest_end[part] == end[part]


def test_only_the_newest_are_kept_and_rubbish_of_dead_writers_goes(tmp_path):
    left = tmp_path / f".step-0000000002.pt.{'0' * 16}.tmp"
    left.write_bytes(b"half")
    train(make_engine(freeze=schedule(0), config=settings(tmp_path, keep=2)))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step-0000000018.pt", "step-0000000020.pt"]


class Interrupted(Exception):
    pass


def running_statistics(folder, *, resume=False, fail_at=None):
    """Train with batch norm; break off in the loss of one step, after its forward."""
    calls = []

    def loss(outputs, targets):
        calls.append(None)
        if len(calls) == fail_at:
            raise Interrupted
        return nn.functional.cross_entropy(outputs, targets)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    unchecked = dataclasses.replace(
        settings(folder, resume=resume),
        check_loss=False,  # which would call it once more
    )
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=loss,
        freeze=pt.freeze.Never(),
        config=unchecked,
    )
    try:
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(24), 6):
                    engine.step(batch)
    except Interrupted:
        return checkpoint.newest_valid(folder)[1]["model"]
    return model.state_dict()


def test_half_done_step_leaves_no_trace_in_running_statistics(tmp_path):
    whole = running_statistics(tmp_path / "whole")
    broken = running_statistics(tmp_path / "part", fail_at=6)
    assert broken["1.num_batches_tracked"] == 5, "a batch that will come again"
    resumed = running_statistics(tmp_path / "part", resume=True)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def gather_over_two_batches(folder, *, stop=None, resume=False):
    """A loop of the user's own: one optimizer step for two batches."""
    engine = make_engine(
        freeze=pt.freeze.Never(), config=settings(folder, resume=resume)
    )
    seen = []
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 4):
                engine.backward(engine.loss(batch))
                seen.append(batch.ids.tolist())
                if batch.index % 2:
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                if batch.index == stop:
                    engine.save(folder / "step-0000000009.pt")
                    return seen
    return seen


def test_batches_whose_gradients_were_not_applied_come_again(tmp_path):
    whole = gather_over_two_batches(tmp_path / "whole")
    first = gather_over_two_batches(tmp_path / "part", stop=2)
    assert first == whole[:3]
    # Batch 2 was only added to gradients, which no checkpoint holds.
    assert gather_over_two_batches(tmp_path / "part", resume=True) == whole[2:]


def begin_on_two_nodes(rank, folder):
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=str(rank))
    return seen_until(folder, stop=2)


def seen_until(folder, *, stop=None, resume=False):
    """Train one pass; return the ids that this rank saw of each batch."""
    engine = make_engine(freeze=schedule(0), config=settings(folder, resume=resume))
    seen = {}
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(50), 12):
                seen[batch.index] = batch.ids.tolist()
                engine.step(batch)
                if batch.index == stop:
                    break
            engine.save(folder / "step-0000000009.pt")
            if stop is not None:
                break
    return seen


@pytest.mark.distributed
def test_one_node_finishes_the_pass_that_two_have_begun(tmp_path):
    first, second = run_ranks(begin_on_two_nodes, 2, tmp_path, timeout_s=90)
    rest = seen_until(tmp_path, resume=True)
    assert list(first) == list(second) == [0, 1, 2] and list(rest) == [3, 4]
    parts = [*first.values(), *second.values(), *rest.values()]
    assert sorted(i for ids in parts for i in ids) == list(range(50))


def test_steps_without_a_folder_are_refused():
    text = "CheckpointConfig.directory: expected a folder when resume or every_steps"
    with pytest.raises(ValueError, match=text):
        pt.CheckpointConfig(every_steps=5)
    with pytest.raises(ValueError, match="every_steps: expected a positive number"):
        pt.CheckpointConfig(directory="runs", every_steps=0)
