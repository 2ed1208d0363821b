"""What can be asked of an engine whose block has ended."""

import pytest
import torch

import pipetransformer as pt
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet


def trained(**settings):
    """Return an engine after its block, and what it said at the end of it."""
    engine = make_engine(freeze=schedule(0, 2), config=config(**settings))
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
        said = engine.plan, str(engine.explain()) if engine.is_main else ""
        weights = engine.state_dict() if engine.is_main else None
    return engine, weights, *said


def test_the_lead_can_still_ask_and_write(tmp_path):
    engine, weights, plan, _ = trained()
    after = engine.state_dict()
    assert weights.keys() == after.keys() and plan == engine.plan
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert all(not value.requires_grad for value in after.values())
    engine.export(tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(weights[name], read[name]) for name in weights)
    told = engine.explain()
    assert told.to_dict()["plan"] and str(told)
    for call in (engine.prepare, engine.evaluate):
        with pytest.raises(ValueError, match="got an engine that is closed"):
            call(ToySet(24), 12) if call == engine.prepare else call(ToySet(24))


def test_after_an_error_nothing_is_given_out(tmp_path):
    engine = make_engine(freeze=pt.freeze.Never())
    with pytest.raises(KeyError), engine:
        engine.prepare(ToySet(24), 12)
        raise KeyError("the script's")
    for call in (
        engine.state_dict,
        engine.explain,
        lambda: engine.plan,
        lambda: engine.export(tmp_path / "model.pt"),
    ):
        with pytest.raises(ValueError, match="got an engine that is closed"):
            call()
    assert not list(tmp_path.iterdir())


def ask(rank, folder):
    engine, weights, *_ = trained(plan=pt.PlanConfig(num_stages=2))
    engine.export(f"{folder}/{rank}.pt")
    try:
        after = engine.state_dict()
    except ValueError as error:
        return engine.is_main, str(error)
    return engine.is_main, all(torch.equal(weights[n], after[n]) for n in weights)


@pytest.mark.distributed
def test_ranks_that_do_not_lead_give_out_nothing(tmp_path):
    (first, equal), (second, said) = run_ranks(ask, 2, str(tmp_path))
    assert first and equal is True and not second
    assert "got an engine that is closed" in said
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


def test_epochs_that_are_done_are_said_to_be(tmp_path, caplog):
    engine = make_engine(freeze=pt.freeze.Never(), config=config())

    def trained_up_to(count):
        begun = []
        for epoch in engine.epochs(count):
            begun.append(epoch)
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
        return begun

    with engine:
        assert trained_up_to(2) == [0, 1]
        assert trained_up_to(3) == [2], "two of three were done"
        assert "nothing is left" not in caplog.text
        assert trained_up_to(3) == []
    assert "epochs(3): nothing is left to train, 3 are done" in caplog.text
