"""The loss that freeze policies decide by: the mean over all rows of all replicas."""

import json
import logging

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config, equal, make_engine, moments
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

EPOCHS, SAMPLES, BATCH = 4, 50, 12  # 5 batches, the last one of 2 rows


class Told(pt.freeze.Schedule):
    """Freezes by a list, and keeps the losses that it was told."""

    needs = frozenset({"loss"})

    def __init__(self, counts):
        super().__init__(counts)
        self.told = []

    def _choose(self, progress, stats):
        self.told.append(stats.loss)
        return super()._choose(progress, stats)


def train(policy, settings, *, epochs=EPOCHS, labels=None):
    """Return what the policy was told, and (loss, rows) of each step of this rank."""
    engine = make_engine(freeze=policy, dtype=torch.float64, config=settings)
    steps = []
    with engine:
        for epoch in engine.epochs(epochs):
            data = ToySet(SAMPLES, dtype=torch.float64)
            if labels is not None:
                data = labels(data, epoch)
            for batch in engine.batches(data, BATCH):
                at = run_of(engine).state.step
                steps.append((at, float(engine.step(batch)), batch.rows))
        end = moments(engine) if engine.plan is not None else None
        if end is not None:
            decisions = [pt.freeze.told(each) for each in policy.log]
            explanation = engine.explain()
            saved = engine.history.freezing
            told = [*decisions, *([] if saved is None else [str(saved)])]
            assert explanation.freezing == tuple(told)
            assert told[-1] in str(explanation)
            # Of a policy that froze something in some passes alone, and only where
            # there is a part to compare with that is long enough.
            parts = parts_of_passes(engine)
            units = {part.shape.num_frozen_layers for part in parts}
            steps_of = [
                part.optimizer_steps
                for part in parts
                if part.shape.num_frozen_layers == min(units)
            ]
            assert (saved is None) == (len(units) < 2 or max(steps_of) < 10)
    return engine, steps, end


def parts_of_passes(engine):
    return [part for each in engine.history.epochs for part in each.segments]


def mean(steps, first, last):
    """Return the mean over the rows of steps `first` to `last`."""
    chosen = [(loss, rows) for at, loss, rows in steps if first <= at < last]
    return sum(loss * rows for loss, rows in chosen) / sum(rows for _, rows in chosen)


@pytest.mark.parametrize("every", [None, 3, 1])
def test_a_policy_is_told_the_mean_since_its_last_decision(every):
    policy = Told([0, 2, 4, 1])
    _, steps, _ = train(policy, config(freeze_every=every))
    each = every or 5
    assert policy.told[0] is None, "before training"
    ends = range(each, len(steps) + 1, each)
    expected = [mean(steps, end - each, end) for end in ends]
    assert policy.told[1:] == pytest.approx(expected, rel=1e-12)
    assert len(policy.told) > 3


def test_with_steps_over_several_batches_all_of_them_count():
    policy = Told([0, 2])
    settings = config(accumulation_steps=2)
    engine, _, _ = train(policy, settings)
    expected = [record.train_loss for record in engine.history.epochs]
    assert policy.told[1:] == pytest.approx(expected, rel=1e-12)


def told_by(rank, counts, settings):
    policy = Told(counts)
    _, steps, _ = train(policy, settings)
    return policy.told, steps, policy.log


@pytest.mark.distributed
@pytest.mark.parametrize("every", [None, 4])
def test_every_rank_is_told_the_mean_over_all_replicas(every):
    """The plan grows to four replicas, and shrinks; standbys come in and leave."""
    settings = config(
        freeze_every=every,
        plan=pt.PlanConfig(slot_memory_bytes=27_000, reshape="always"),
    )
    found = run_ranks(told_by, 4, [0, 3, 6, 0, 6], settings, timeout_s=110)
    (lead, _, log), *others = found
    for told, _, _ in others:
        # A rank that was not active at the time was asked nothing.
        assert [loss for loss in told if loss is not None] == [
            loss for loss in lead if loss in told and loss is not None
        ]
    steps = [step for _, each, _ in found for step in each]
    each = every or 5
    points = [entry["progress"]["step"] for entry in log[1:]]
    assert len(points) >= 4
    expected = [mean(steps, end - each, end) for end in points]
    assert lead[1:] == pytest.approx(expected, rel=1e-9)


def test_while_something_is_at_stake_the_run_is_the_unfrozen_one_bit_by_bit():
    _, plain, end = train(pt.freeze.Never(), config())
    engine, guarded, same = train(pt.freeze.Guarded(stake=1e-6), config())
    assert guarded == plain
    for part in ("weights", "tensors"):
        assert equal(same[part], end[part])
    assert [entry["units"] for entry in engine.history.freezes] == [0]


def test_a_dry_run_is_the_unfrozen_run_bit_by_bit():
    _, plain, end = train(pt.freeze.Never(), config())
    policy = pt.freeze.Guarded(stake=0.95, dry_run=True)
    _, dry, same = train(policy, config())
    assert dry == plain
    for part in ("weights", "tensors"):
        assert equal(same[part], end[part])
    assert max(entry["wanted"] for entry in policy.log) > 0


def misread(losses):
    """Let this rank take all losses for nine times what they are."""
    settle = losses.settle
    losses.settle = lambda parts: settle((9 * total, rows) for total, rows in parts)


def taken(policy):
    """Return what was decided since training began, and by what."""
    return [
        (entry["decision"], entry["statistics"])
        for entry in policy.log
        if entry["progress"]["step"]
    ]


def eight(rank, wrong):
    """Train with eight replicas; `wrong`: this rank's losses are read wrongly."""
    policy = pt.freeze.Guarded(stake=0.9)
    settings = config(plan=pt.PlanConfig(num_stages=1))
    engine = make_engine(freeze=policy, dtype=torch.float64, config=settings)
    try:
        with engine:
            data = ToySet(SAMPLES, dtype=torch.float64)
            for epoch in engine.epochs(5):
                for batch in engine.batches(data, 16):
                    engine.step(batch)
                weights = [p.detach().clone() for p in model_of(engine).parameters()]
                if epoch == 1 and rank == wrong:
                    misread(run_of(engine).state.losses)
        return taken(policy), None
    except RuntimeError as error:
        after = [p.detach().clone() for p in model_of(engine).parameters()]
        return equal(weights, after), str(error)


@pytest.mark.distributed
def test_eight_replicas_with_other_rows_decide_alike():
    found = run_ranks(eight, 8, None, timeout_s=110)
    assert all(each == found[0] for each in found)
    decisions, _ = found[0]
    assert [units for units, _ in decisions][-1] > 0
    assert all(statistics["loss"] > 0 for _, statistics in decisions)
    assert len(decisions) == 5


@pytest.mark.distributed
def test_a_rank_that_measures_something_else_is_reported_and_nothing_changes():
    found = run_ranks(eight, 8, 5, timeout_s=110)
    for unchanged, text in found:
        assert "plan hashes: expected the same on every active rank" in text
        assert "nothing was changed" in text
        assert unchanged


def always(label):
    """Return a set whose labels are all the same, and soon learnt."""
    data = ToySet(SAMPLES, dtype=torch.float64, vouch=True)
    data.y = torch.full_like(data.y, label)
    return data


def guarded_by(rank):
    policy = pt.freeze.Guarded(stake=0.2, alpha=0.5)
    torch.manual_seed(rank)
    settings = config(plan=pt.PlanConfig(slot_memory_bytes=27_000, reshape="always"))
    engine, steps, end = train(
        policy,
        settings,
        epochs=12,
        labels=lambda data, epoch: always(0 if epoch < 6 else 1),
    )
    return {
        "log": policy.log,
        "steps": steps,
        "weights": [p.detach().clone() for p in model_of(engine).parameters()],
        "active": end is not None,
        "freezes": engine.history.freezes,
        "reasons": [change.reason for change in engine.history.transformations],
        "samples": [record.unique_samples for record in engine.history.epochs],
    }


@pytest.mark.distributed
def test_changed_labels_thaw_what_was_frozen_on_all_ranks_alike():
    found = run_ranks(guarded_by, 4, timeout_s=110)
    lead = found[0]
    units = [entry["units"] for entry in lead["freezes"]]
    assert units[0] == 0
    assert max(units) > 0
    thaw = units.index(0, 1)
    assert lead["freezes"][thaw]["epoch"] == 7, "the first point that knows"
    assert any("came back" in reason for reason in lead["reasons"])
    assert any("of its first mean" in reason for reason in lead["reasons"])
    assert lead["samples"] == [SAMPLES] * 12
    decisions = {e["progress"]["epoch"]: e["decision"] for e in lead["log"]}
    for each in found[1:]:
        for entry in each["log"]:
            assert entry["decision"] == decisions[entry["progress"]["epoch"]]
        if each["active"]:
            assert equal(each["weights"], lead["weights"])
    log = json.loads(json.dumps(lead["log"]))
    again = pt.freeze.replay(lambda: pt.freeze.Guarded(stake=0.2), log)
    assert again == [entry["decision"] for entry in lead["log"]]


# -- the default -------------------------------------------------------------------


def default_engine(model, **options):
    return pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        **options,
    )


def policy_of(engine):
    with engine:
        return run_of(engine).policy


def test_without_a_policy_it_is_the_guarded_one():
    engine = default_engine(toy_model(6), units=toy_units(6))
    assert isinstance(policy_of(engine), pt.freeze.Guarded)


def test_without_a_policy_nothing_freezes_where_nothing_can(caplog):
    shared = nn.Linear(3, 3)
    tied = nn.Sequential(shared, nn.Linear(3, 3), nn.Linear(3, 3))
    tied[2].weight = shared.weight
    forced = config(plan=pt.PlanConfig(num_stages=2, cuts=(3,)))
    with caplog.at_level(logging.INFO):
        assert isinstance(policy_of(default_engine(tied)), pt.freeze.Never)
        assert "share the parameter weight" in caplog.text
        engine = default_engine(toy_model(6), config=forced)
        assert isinstance(policy_of(engine), pt.freeze.Never)
        single = default_engine(nn.Sequential(nn.Linear(3, 3)))
        assert isinstance(policy_of(single), pt.freeze.Never)
        assert "one layer alone" in caplog.text
