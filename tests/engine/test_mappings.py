"""Batches of named tensors, and models that know which of them they take."""

import functools
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import pipetransformer as pt
from pipetransformer.data.division import TARGET_NAMES, Division
from pipetransformer.data.loading import ElasticSampler, batches
from tests.engine.scenario import config, make_engine
from tests.support.toy import ToySet, accuracy, toy_model


class Named(torch.utils.data.Dataset):
    """Samples as mappings: what the first layer takes in two parts, and the class."""

    def __init__(self, size, target="labels", container=dict):
        self.pairs = ToySet(size)
        self.target = target
        self.container = container

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return {"left": x[:2], "right": x[2:], self.target: y}

    def collate(self, samples):
        return self.container(default_collate(samples))


class Pairs(Named):
    """The same as pairs."""

    def collate(self, samples):
        batch = default_collate(samples)
        labels = batch.pop(self.target)
        return batch, labels


class Halves(Named):
    """The same, in halves that are loaded on their own."""

    def inputs(self, index):
        sample = self[index]
        sample.pop(self.target)
        return sample

    def targets(self, index):
        return {self.target: self[index][self.target]}

    def input_key(self, index, epoch):
        return index


class Join(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, left, right):
        return self.first(torch.cat([left, right], 1))


def layers():
    first, *others = toy_model(3)
    return nn.Sequential(Join(first), *others)


class Known:
    """A model with layers, a loss and names of its own."""

    def __init__(self):
        self.sequential = layers()
        self.units = [2, 3, 4]
        self.ragged = None
        self.weighed = 0

    def inputs(self, batch):
        return batch["left"], batch["right"]

    def targets(self, batch):
        return batch["gold"]

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def loss_weight(self, targets):
        self.weighed += 1
        return len(targets)

    def export(self, folder, *, merge=False):
        raise AssertionError("nothing is exported here")


def train(make, samples, **options):
    """Return what training and an evaluation with frozen layers give."""
    engine = pt.PipeTransformer(
        make(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        freeze=pt.freeze.Schedule([0, 1]),
        config=config(),
        **options,
    )
    with engine:
        for _ in engine.epochs(2):
            # Of 13 samples the last batch has one alone.
            for batch in engine.batches(samples, 4, **loading(samples)):
                engine.step(batch)
        found = engine.evaluate(samples, {"accuracy": accuracy}, **collator(samples))
        losses = [epoch.train_loss for epoch in engine.history.epochs]
    return losses, found


def collator(samples):
    lazy = isinstance(samples, Halves)
    return {} if lazy else {"collate_fn": samples.collate}


def loading(samples):
    return {**collator(samples), "num_workers": getattr(samples, "workers", 0)}


own_loss = {"loss": nn.functional.cross_entropy}


@pytest.fixture
def expected():
    return train(layers, Pairs(13), **own_loss)


@pytest.fixture
def expected_of_known():
    return train(layers, Pairs(13), **own_loss, units=[2, 3, 4])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("container", [dict, UserDict])
@pytest.mark.parametrize("target", ["labels", "label", "targets"])
def test_mappings_train_and_evaluate_as_pairs_do(workers, container, target, expected):
    samples = Named(13, target, container)
    samples.workers = workers
    assert train(layers, samples, **own_loss) == expected


@pytest.mark.parametrize("kind", [Named, Halves])
def test_an_adapted_model_brings_layers_units_loss_and_names(kind, expected_of_known):
    model = Known()
    losses, found = train(lambda: model, kind(13, "gold"))
    assert losses == pytest.approx(expected_of_known[0])
    assert found == pytest.approx(expected_of_known[1])
    assert model.weighed > 0


def test_an_own_loss_of_an_adapted_model_has_its_own_weight(expected):
    model = Known()
    found = train(lambda: model, Named(13, "gold"), **own_loss, units=[1, 2, 3])
    assert found == expected
    assert model.weighed == 0


def test_the_own_loss_can_be_named(expected_of_known):
    _, found = train(Known, Named(13, "gold"), loss="model")
    assert found == pytest.approx(expected_of_known[1])


@pytest.mark.parametrize("loss", [None, "model"])
def test_a_plain_sequential_needs_a_loss(loss):
    with pytest.raises(TypeError, match="loss: expected a callable loss.outputs, targ"):
        pt.PipeTransformer(
            layers(), optimizer=torch.optim.SGD, freeze=pt.freeze.Never(), loss=loss
        )


def test_export_for_transformers_needs_a_model_of_theirs(tmp_path):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match="export_transformers: .* of an nn.Sequen"):
            engine.export_transformers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_targets_come_in_a_fixed_order():
    columns = {name: torch.full((2,), n) for n, name in enumerate(TARGET_NAMES)}
    inputs, targets = Division().pair({"x": torch.zeros(2), **columns})
    assert list(inputs) == ["x"]
    assert [int(t[0]) for t in targets] == list(range(len(TARGET_NAMES)))
    spans = {name: columns[name] for name in ("end_positions", "start_positions")}
    assert [int(t[0]) for t in Division().pair(spans)[1]] == [2, 3]


def test_a_mapping_without_targets_is_an_error_that_names_what_counts():
    text = "batch: expected targets in an entry labels, label, .*, got left, right, y"
    with pytest.raises(ValueError, match=text):
        next(batches(Named(3, "y"), ElasticSampler(3, 2)))
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.prepare(ToySet(8), 4)
        with pytest.raises(ValueError, match=text):
            engine.evaluate(Named(3, "y"))


def test_what_is_neither_a_pair_nor_a_mapping_is_an_error():
    with pytest.raises(TypeError, match="expected .inputs, targets. pairs, or map"):
        Division().pair((1, 2, 3))


def test_inputs_alone_need_no_targets():
    assert Division().inputs({"x": 1, "labels": 2}) == {"x": 1}
    assert Division().inputs({"x": 1}) == {"x": 1}
    assert Division().inputs((1, 2)) == 1


def test_inputs_alone_say_how_predictions_take_them():
    with pytest.raises(TypeError, match=r"without targets let collate_fn return \(in"):
        Division().inputs(torch.ones(2, 3))
    inputs = torch.ones(2, 3)
    assert Division().inputs((inputs, None)) is inputs


class Kept(NamedTuple):
    hidden: torch.Tensor
    more: list


class Wrap(nn.Module):
    """Returns a mapping, with what is no tensor in it, and containers of all kinds."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        kept = Kept(self.layer(x), [x, None])
        return {"kept": kept, "more": [x], "name": "wrapped"}


class Unwrap(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, given):
        assert given["more"] + [1] and given["kept"].more[1] is None
        return self.layer(given["kept"].hidden)


def nested_layers():
    first, second, third, *others = toy_model(3, dtype=torch.float64)
    return nn.Sequential(Join(first), Wrap(second), Unwrap(third), *others)


def train_nested(slots, boundary):
    """Train in the engine, half of it with frozen layers; return losses and outputs."""
    engine = pt.PipeTransformer(
        nested_layers(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, boundary]),
        config=config(
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
    )
    samples = Doubles(16)
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(samples, 16):
                engine.step(batch)
        assert engine.plan.boundary == boundary
        outputs = engine.predict(samples)
    return [epoch.train_loss for epoch in engine.history.epochs], outputs


class Doubles(Named):
    def __getitem__(self, index):
        return {
            key: value.double() if key != "labels" else value
            for key, value in super().__getitem__(index).items()
        }


def train_nested_plainly(boundary):
    model, samples = nested_layers(), Doubles(16)
    losses = []
    for epoch in range(2):
        if epoch:
            model[:boundary].requires_grad_(False)
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1
        )
        batch, labels = whole_batch(samples)
        loss = nn.functional.cross_entropy(through(model, batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, through(model.eval(), whole_batch(samples)[0])


def whole_batch(samples):
    batch = default_collate([samples[i] for i in range(16)])
    return batch, batch.pop("labels")


def through(model, batch):
    value = model[0](**batch)
    for layer in model[1:]:
        value = layer(value)
    return value


@pytest.mark.parametrize("boundary", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_mapping_between_layers_is_one_argument(slots, boundary):
    losses, outputs = train_nested(slots, boundary)
    wanted, expected = train_nested_plainly(boundary)
    assert losses == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
