"""What a run tells of its freeze decisions is what froze."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config
from tests.support.toy import ToySet, toy_model


def test_units_that_tied_weights_hold_are_told_as_wanted_and_not_as_frozen():
    model = toy_model(4)
    model[3].up.weight = model[1].up.weight
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, 2, 3, 5]),
        config=config(),
    )
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
        told = str(engine.explain())
    decisions = engine.history.decisions
    frozen = [epoch.shape.num_frozen_layers for epoch in engine.history.epochs]
    assert [d["units"] for d in decisions[:4]] == frozen == [0, 1, 1, 5]
    assert [d["wanted"] for d in decisions[:4]] == [0, 2, 3, 5]
    assert (
        "share the parameter" in decisions[1]["why"]
        and "share" not in decisions[3]["why"]
    )
    assert "point 2, step 4: 1 of 5 units frozen (3 wanted)" in told
    summary = engine.history.to_json()["decisions"]
    assert [d["units"] for d in summary[:4]] == frozen


@pytest.mark.parametrize(("every", "last"), [(None, (1, 3)), (3, (1, 1))])
def test_a_run_that_stops_at_an_evaluation_point_decides_there_when_it_goes_on(
    tmp_path, every, last
):
    """The last batch before a decision is trained on, and the loop is left."""

    def run(stop=None, resume=False):
        policy = pt.freeze.Guarded(stake=0.9, dry_run=True)
        engine = pt.PipeTransformer(
            toy_model(4),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            freeze=policy,
            config=config(
                freeze_every=every,
                checkpoint=pt.CheckpointConfig(directory=tmp_path, resume=resume)
                if stop or resume
                else pt.CheckpointConfig(),
            ),
        )
        with engine:
            for epoch in engine.epochs(4):
                for batch in engine.batches(ToySet(48), 12):
                    engine.step(batch)
                    if (epoch, batch.index) == stop:
                        break
                else:
                    continue
                break
        return [(d["progress"]["epoch"], d["statistics"]) for d in policy.log]

    whole, begun, ended = run(), run(stop=last), run(resume=True)
    assert whole == begun + ended
    assert all("loss" in statistics for _, statistics in whole[1:])
    assert 0 < len(begun) < len(whole)
