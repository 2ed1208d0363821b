"""How an evaluation set is cut, and what of it ranks tell each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipetransformer as pt
from pipetransformer.autodp import ActiveGroup
from pipetransformer.loop.microbatches import microbatches
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy, toy_model


@given(st.integers(1, 5000), st.integers(1, 300))
def test_microbatches_hold_each_sample_once_and_are_one_row_apart(total, most):
    cut = microbatches(total, most)
    assert [i for rows in cut for i in rows] == list(range(total))
    sizes = {len(rows) for rows in cut}
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(cut) == -(-total // most)


WIDE = 5_000  # classes: the outputs of 21 samples take 420 kB


def evaluate_wide(rank, check_loss):
    """Evaluate; return the result, and the bytes that were gathered at most."""
    sent, plain = [0], ActiveGroup.all_gather_bytes

    def counted(group, value):
        sent.append(len(value))
        return plain(group, value)

    engine = pt.PipeTransformer(
        toy_model(classes=WIDE),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(check_loss=check_loss),
    )
    with engine:
        engine.prepare(ToySet(24), 12)
        ActiveGroup.all_gather_bytes = counted
        try:
            result = engine.evaluate(ToySet(21, seed=2), {"accuracy": accuracy})
        finally:
            ActiveGroup.all_gather_bytes = plain
    return result, max(sent)


@pytest.mark.distributed
def test_outputs_stay_where_they_are_unless_the_loss_compares_rows():
    wanted, _ = evaluate_wide(0, True)
    for result, sent in run_ranks(evaluate_wide, 2, True):
        assert result == wanted, "the result depends on the plan"
        assert sent < 10_000
    for result, sent in run_ranks(evaluate_wide, 2, False):
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert result["accuracy"] == wanted["accuracy"]
        assert sent > 4 * WIDE * 7  # a share of 7 or 8 rows


class Contrast(nn.Module):
    """Compares each row with the others of its batch."""

    def forward(self, outputs, targets):
        return (outputs[:, None] - outputs[None]).square().sum(-1).mean()


@pytest.mark.distributed
def test_a_loss_that_compares_rows_sees_the_whole_set():
    def whole():
        model, data = toy_model(), ToySet(21, seed=2)
        return float(Contrast()(model(data.x), data.y))

    for result in run_ranks(evaluate_contrast, 2):
        assert result["loss"] == pytest.approx(whole(), rel=1e-5)


def evaluate_contrast(rank):
    engine = pt.PipeTransformer(
        toy_model(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=Contrast(),
        freeze=pt.freeze.Never(),
        config=config(check_loss=False),
    )
    with engine:
        engine.prepare(ToySet(24), 12)
        return engine.evaluate(ToySet(21, seed=2))


OF_SETS = ("in/loss", "in/inner", "out/loss", "out/outer")


class Watching(pt.freeze.Policy):
    """Keeps what it is told of evaluations, and freezes with the first one."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _choose(self, progress, stats):
        self.seen.append((dict(progress.metrics), dict(progress.evaluations)))
        return 2 if progress.metrics else 0


def watch(rank):
    """Evaluate one set after the first batch of each pass, another one after it."""
    policy, returned = Watching(), []
    engine = make_engine(freeze=policy)
    with engine:
        for _ in engine.epochs(2):
            found = {}
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
                if batch.index == 0:
                    test = ToySet(9, seed=2)
                    inner = engine.evaluate(test, {"inner": accuracy}, name="in")
            outer = engine.evaluate(ToySet(7, seed=3), {"outer": accuracy}, name="out")
            found = {f"in/{metric}": value for metric, value in inner.items()}
            found |= {f"out/{metric}": value for metric, value in outer.items()}
            returned.append(found | inner | outer)
        state = run_of(engine).state
        assert (state.metrics, state.evaluated) == policy.seen[-1]
    return policy.seen, returned


@pytest.mark.distributed
def test_policies_are_told_of_all_evaluations_within_passes_and_after_them():
    for seen, returned in [watch(0), *run_ranks(watch, 2)]:
        assert seen[:-2] in ([({}, {})], []), "the lead alone is asked before training"
        assert [metrics for metrics, _ in seen[-2:]] == returned
        assert [counts for _, counts in seen[-2:]] == [
            {"loss": 2 * n, "inner": n, "outer": n, **dict.fromkeys(OF_SETS, n)}
            for n in (1, 2)
        ]


class Told(pt.report.Callback):
    def __init__(self):
        self.found = []

    def on_evaluation(self, epoch, metrics):
        self.found.append(metrics)


def evaluate_sets(names, folder=None, epochs=1):
    """Evaluate sets by their names, None for none, in turn.

    Returns:
        The losses that were returned in the last epoch, by set, what callbacks were
        told, and the metrics of the last record.
    """
    told, losses = Told(), {}
    saves = pt.CheckpointConfig(directory=folder, resume=folder is not None)
    engine = make_engine(
        freeze=schedule(0), callbacks=[told], config=config(checkpoint=saves)
    )
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
            for seed, name in enumerate(names):
                named = {} if name is None else {"name": name}
                found = engine.evaluate(ToySet(9, seed=seed), **named)
                losses[name or "eval"] = found["loss"]
    return losses, told.found, engine.history.epochs[-1].metrics


@pytest.mark.parametrize("names", [(None, "test"), ("test", None), ("dev", "test")])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_metrics_of_each_of_several_sets_are_kept(names, epochs):
    losses, told, metrics = evaluate_sets(names, epochs=epochs)
    sets = [name or "eval" for name in names]
    by_set = {f"{name}/loss": losses[name] for name in sets}
    assert metrics == {"loss": losses[sets[-1]], **by_set}
    # Of the first pass those of the first set come again, by its name.
    named = sets if epochs == 1 else sets[1:]
    wanted = {f"{name}/loss": losses[name] for name in named}
    assert told[-1] == {"loss": losses[sets[1]], **wanted}


def test_the_metrics_of_a_single_set_have_no_other_name():
    losses, told, metrics = evaluate_sets(("test",), epochs=2)
    assert metrics == told[-1] == {"loss": losses["test"]}


def test_a_resumed_run_knows_which_sets_there_are(tmp_path):
    evaluate_sets(("dev", "test"), tmp_path)
    losses, told, metrics = evaluate_sets(("dev",), tmp_path, epochs=2)
    assert metrics == told[-1] == {"loss": losses["dev"], "dev/loss": losses["dev"]}
