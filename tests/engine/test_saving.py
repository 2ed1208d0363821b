"""Weights leave and enter as the plain model's state_dict."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint.content import each_once
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model


def train(engine, epochs=2):
    for _ in engine.epochs(epochs):
        for batch in engine.batches(ToySet(24), 12):
            engine.step(batch)


def equal(left, right):
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_weights_leave_as_a_copy_a_file_and_from_a_checkpoint_alike(tmp_path):
    plain, offline, saved = (tmp_path / f"{n}.pt" for n in ("plain", "offline", "c"))
    with make_engine(freeze=schedule(0, 3)) as engine:
        first = engine.state_dict()  # before the first pass: the weights as given
        equal(first, toy_model().state_dict())
        train(engine)
        copied = engine.state_dict()
        engine.export(plain)
        engine.save(saved)
        assert engine.plan.boundary > 0, "names must not depend on the plan"
        engine.step(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    pt.export_checkpoint(saved, offline)
    trained = model_of(engine).state_dict()
    assert any(not torch.equal(copied[n], trained[n]) for n in copied), "a copy"
    for path in (plain, offline):
        model = toy_model(seed=9)
        model.load_state_dict(torch.load(path, weights_only=True))
        equal(dict(model.state_dict()), copied)


def test_plain_weights_given_to_load_say_where_they_belong(tmp_path):
    torch.save(toy_model().state_dict(), tmp_path / "plain.pt")
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match="got a model's state_dict; load it into"):
            engine.load(tmp_path / "plain.pt")
    with pytest.raises(ValueError, match="got a model's state_dict"):
        pt.export_checkpoint(tmp_path / "plain.pt", tmp_path / "again.pt")
    assert not (tmp_path / "again.pt").exists()


def ask_for_weights(rank, folder):
    settings = config(plan=pt.PlanConfig(max_replicas=1))
    with make_engine(freeze=pt.freeze.Never(), config=settings) as engine:
        train(engine, 1)
        engine.export(folder / f"{rank}.pt")
        if engine.is_main:
            torch.save(engine.state_dict(), folder / "by hand.pt")
        try:
            answer = float(sum(v.double().sum() for v in engine.state_dict().values()))
        except ValueError as error:
            answer = str(error)
    return answer


@pytest.mark.distributed
def test_standby_has_no_weights_and_writes_none(tmp_path):
    first, second = run_ranks(ask_for_weights, 2, tmp_path)
    assert isinstance(first, float)
    assert second == (
        "state_dict of rank 1: expected an active rank, got a standby, whose weights "
        "are old; ask where engine.is_main is true, or call engine.export(path) on "
        "every rank"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"0.pt", "by hand.pt"}
    paths = (tmp_path / name for name in ("0.pt", "by hand.pt"))
    equal(*(torch.load(path, weights_only=True) for path in paths))


def test_tied_weights_leave_as_one_tensor_and_parts_of_one_do_not():
    """So a file of them is as large as one of the model's own."""
    toy = list(toy_model())
    tied = nn.Sequential(*toy, nn.Linear(3, 3), nn.Linear(3, 3))
    tied[-1].weight = tied[-2].weight
    both = torch.arange(6.0)
    tied[0].register_buffer("front", both[:3])
    tied[0].register_buffer("whole", both)
    with pt.PipeTransformer(
        tied,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    ) as engine:
        train(engine, 1)
        found = engine.state_dict()
    equal(found, tied.state_dict())
    names = [f"{len(toy)}.weight", f"{len(toy) + 1}.weight"]
    assert found[names[0]] is found[names[1]]
    assert found["0.front"] is not found["0.whole"]
    own = {value.data_ptr() for value in tied.state_dict().values()}
    assert not own & {value.data_ptr() for value in found.values()}, "copies"


def test_what_only_looks_tied_leaves_apart():
    toy = toy_model()
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    toy[0].register_buffer("numbers", numbers)
    toy[0].register_buffer("conjugate", numbers.conj())
    toy[0].register_buffer("none", torch.zeros(0))
    toy[0].register_buffer("nothing", torch.zeros(0, 2))
    with pt.PipeTransformer(
        toy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    ) as engine:
        equal(engine.state_dict(), toy.state_dict())


def test_tied_weights_leave_as_one_tensor_whatever_they_are_copied_by():
    tied = nn.Linear(3, 3)
    model = nn.ModuleList([tied, nn.Linear(3, 3, bias=False), nn.Linear(3, 3)])
    model[1].weight = tied.weight
    copied = each_once(model.state_dict(), lambda value: value.clone())
    assert copied._metadata == model.state_dict()._metadata, "versions of modules"
    assert list(copied) == list(model.state_dict())
    assert copied["0.weight"] is copied["1.weight"]
    assert copied["0.weight"].data_ptr() != tied.weight.data_ptr()
    assert not torch.equal(copied["2.weight"], copied["0.weight"])
