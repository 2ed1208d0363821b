"""Layers hand on what has no rows; frozen layers give it to every micro-batch."""

import dataclasses

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.core.fixed_values import same, tensors_have_rows
from pipetransformer.replica.handed_on import Form, as_given, handed_on, of_one_form
from pipetransformer.replica.unit_activations import unit_activations
from tests.engine.scenario import config
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model

SCALE, TABLE = torch.tensor(2.0), torch.arange(6.0).reshape(3, 2)


@dataclasses.dataclass
class Equal:
    name: str


class Opaque:
    """Has no ``__eq__``."""


ONE = Opaque()


class Hand(nn.Module):
    def __init__(self, layer, more):
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x):
        return self.more(self.layer(x))


class Take(nn.Module):
    """Uses what it is given; without it, what it has."""

    def __init__(self, layer, value=None):
        super().__init__()
        self.layer, self.value = layer, value

    def forward(self, *given):
        if isinstance(given[0], dict):
            given = tuple(given[0].values())
        x, value = given if len(given) == 2 else (*given, self.value)
        if isinstance(value, torch.Tensor):
            x = x * value.sum() + len(value.reshape(-1))
        return self.layer(x)


def train(more, slots, *, value=None, freeze=None, schedule="gpipe", **options):
    """Train with two micro-batches; return the losses."""
    first, second, third, *others = toy_model(3, dtype=torch.float64)
    engine = pt.PipeTransformer(
        nn.Sequential(first, Hand(second, more), Take(third, value), *others),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        loss=nn.CrossEntropyLoss(),
        freeze=freeze or pt.freeze.Schedule([0, 2, 2]),
        config=config(
            pipe=pt.PipeConfig(num_slots=slots, schedule=schedule),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
        **options,
    )
    samples = ToySet(10, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(samples, 6):
                engine.step(batch)
        found = engine.evaluate(samples)["loss"]
    return [*(epoch.train_loss for epoch in engine.history.epochs), found]


FIXED = {
    "0-dim in a dict": (lambda x: {"x": x, "more": SCALE * 1}, SCALE),
    "0-dim in a tuple": (lambda x: (x, SCALE * 1), SCALE),
    # As long as a micro-batch, and as the whole of one that a frozen layer runs.
    "table": (lambda x: (x, TABLE * 1), TABLE),
    "long table": (lambda x: (x, TABLE.reshape(6, 1) * 1), TABLE),
    "one row": (lambda x: (x, TABLE[:1] * 1), TABLE[:1]),
    "keys of two kinds": (lambda x: {"x": x, 1: SCALE * 1}, SCALE),
    "no row": (lambda x: (x, TABLE[:0] * 1), TABLE[:0]),
    "equal objects": (lambda x: {"x": x, "more": Equal("a")}, None),
    "one object": (lambda x: {"x": x, "more": ONE}, None),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("slots", [1, 2])
def test_fixed_values_reach_every_micro_batch(name, slots):
    more, value = FIXED[name]
    expected = train(lambda x: x, slots, value=value)
    assert train(more, slots) == pytest.approx(expected, rel=1e-9)


def train_as_rank(_rank, name):
    more, value = FIXED[name]
    return train(more, 1), train(lambda x: x, 1, value=value)


@pytest.mark.distributed
def test_fixed_values_reach_every_replica():
    for found, expected in run_ranks(train_as_rank, 2, "table"):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["0-dim in a dict", "table"])
def test_fixed_values_reach_steps_that_have_the_loss(name, schedule):
    more, value = FIXED[name]
    expected = train(lambda x: x, 2, value=value, schedule=schedule)
    assert train(more, 2, schedule=schedule) == pytest.approx(expected, rel=1e-9)


def test_a_unit_is_known_by_what_has_rows():
    layer = Hand(nn.Linear(4, 3), lambda x: {"table": TABLE[:1], "x": x})
    inputs = torch.randn(5, 4)
    (found,) = unit_activations(nn.Sequential(layer), [1], inputs, most_rows=3, seed=0)
    assert torch.equal(found, layer.layer(inputs))


CHANGING = {
    "another tensor of shape ()": lambda x: (x, x.mean()),
    "another tensor of shape (2,)": lambda x: (x, torch.rand(2)),
    "another Opaque": lambda x: (x, Opaque()),
    "another int": lambda x: (x, len(x)),
}


@pytest.mark.parametrize("got", CHANGING)
def test_what_changes_is_refused_where_layers_may_freeze(got):
    text = r"layer 1 \(Hand\): expected .* the same for every micro-batch, .* got "
    with pytest.raises(TypeError, match=text) as caught:
        train(CHANGING[got], 1)
    assert caught.value.args[0].endswith(f"{got} for each")
    # No boundary lies behind it, so each micro-batch has its own.
    for options in ({"freeze": pt.freeze.Never()}, {"units": [1, 3, 4]}):
        assert len(train(CHANGING[got], 2, **options)) == 4


def test_values_are_told_apart():
    assert same(Equal("a"), Equal("a")) and not same(Equal("a"), Equal("b"))
    assert same(ONE, ONE) and not same(Opaque(), Opaque())
    assert same(TABLE, TABLE.clone()) and not same(TABLE, TABLE.double())
    unknown = torch.tensor([1.0, float("nan")])
    assert same(unknown, unknown) and not same(unknown, unknown.clone())
    held = [Equal(torch.ones(2)) for _ in range(2)]
    assert not same(*held)  # how tensors compare is not for us to say


def test_rows_are_told_from_tables():
    def outputs(rows):
        return {"x": torch.zeros(rows, 2), "flat": torch.zeros(4 * rows), "t": TABLE}

    found = tensors_have_rows("L", (outputs(3), outputs(1)), (3, 1))
    assert found == [True, True, False]
    with pytest.raises(TypeError, match="layer L: .* got 2 and 1 values"):
        tensors_have_rows("L", ((TABLE, None), TABLE), (3, 1))


def test_pieces_that_differ_in_a_fixed_value_are_refused():
    pieces = [(torch.zeros(2, 3), torch.tensor(float(k))) for k in range(2)]
    for other in (pieces[1], pieces[0][:1], (*pieces[0], None)):
        with pytest.raises(TypeError, match="expected equal values for each micro-b"):
            handed_on([pieces[0], other], [True, False])
    first, second = handed_on([pieces[0]] * 2, [True, False])
    assert first.tensors == second.tensors == pieces[0][:1]
    x, whole = as_given(first)
    assert x is pieces[0][0] and torch.equal(whole.tensor, pieces[0][1])
    assert of_one_form([first, second]) and of_one_form([TABLE, TABLE])
    assert not of_one_form([first, TABLE]) and not of_one_form([TABLE, first])
    whole.tensor.add_(1.0)  # as a layer behind may do
    assert torch.equal(as_given(second)[1].tensor, pieces[0][1])


def test_a_form_is_told_by_its_text():
    def form(**changes):
        output = {"x": TABLE, "t": SCALE, "n": [None, 1, "a"], "b": True, **changes}
        return Form(output, [True, False])

    assert form() == form(x=2 * TABLE) and form().text() == form().text()
    others = [form(t=SCALE + 1), form(t=SCALE.double()), form(n=(None, 1, "a"))]
    others += [form(n=[None, 1, "b"]), form(b=1), form(t=SCALE[None])]
    assert all(form() != other for other in others)
    assert len({each.text() for each in [form(), *others]}) == len(others) + 1
    opaque = form(b=Equal("a"))
    assert opaque.text() is None and opaque == opaque and opaque != form(b=Equal("a"))
    assert (
        form().has_numbers() and not Form({"x": TABLE, "n": "a"}, [True]).has_numbers()
    )
    assert form(t=SCALE.bfloat16()).text() and form(t=TABLE[:0]).text()
    turned = torch.tensor([1.0 + 2.0j])
    assert form(t=turned.conj()) == form(t=turned.conj().resolve_conj())
    assert form(t=turned.conj()) != form(t=turned)
