"""`CacheConfig.debug`: a layer that must not be cached is named, at once."""

import contextlib

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import ActivationCache
from pipetransformer.data.structures import rows_of
from pipetransformer.pipe import Workers
from pipetransformer.replica.differences import difference
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.faulty_layer import faulty_layer
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock
from tests.engine.scenario import config
from tests.support.private import model_of, run_of
from tests.support.ranks import Ranks
from tests.support.toy import ToySet, toy_model

SIZE, BATCH = 24, 12


class AlwaysDropout(nn.Module):
    """Drops in eval mode too."""

    def __init__(self, inplace=False):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True, inplace=self.inplace)


class Mixing(nn.Module):
    """Each row depends on the others of its batch."""

    def forward(self, x):
        return x - x.mean(0)


SETTING = {"by": 0.0}  # of the file: no fingerprint sees it


class Shifting(nn.Module):
    """Its code changes, which no fingerprint sees."""

    def forward(self, x):
        return x + SETTING["by"]


class Pair(nn.Module):
    """Gives two tensors."""

    def forward(self, x):
        return x, x.round().long()


class WrongSecond(nn.Module):
    def forward(self, x, y):
        return x, y + torch.randint_like(y, 1, 1000)


class Joined(nn.Module):
    def forward(self, x, y):
        return x + y


def engine_of(*layers, slots=1, frozen=3, **cache):
    """Return an engine of a toy model with these layers behind its first one."""
    toy = list(toy_model(3))
    return pt.PipeTransformer(
        nn.Sequential(toy[0], *layers, *toy[1:]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([frozen]),
        config=config(
            cache=pt.CacheConfig(**cache),
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
    )


def train(engine, *, change=None, evaluates=False):
    """Return the losses and the history; `change` is called in the third epoch."""
    losses = []
    with engine:
        for epoch in engine.epochs(4):
            for batch in engine.batches(ToySet(SIZE), BATCH):
                if (epoch, batch.index) == (2, 1) and change is not None:
                    change(model_of(engine))
                losses.append(float(engine.step(batch)))
            if evaluates:
                losses.append(engine.evaluate(ToySet(21, seed=2), name="dev")["loss"])
        cache = run_of(engine).caches.of("dev", 21)
        audited = 0 if cache is None else cache.counters.audited
    return losses, engine.history, audited


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("views", [None, 1, 2])
def test_a_clean_model_trains_with_the_same_losses(slots, views):
    found = train(
        engine_of(nn.Tanh(), slots=slots, debug=True, views=views), evaluates=True
    )
    plain = train(engine_of(nn.Tanh(), slots=slots, views=views), evaluates=True)
    assert found[0] == plain[0]
    for mine, other in zip(found[1].cache, plain[1].cache, strict=True):
        assert mine["audited"] == mine["hits"] == other["hits"]
    assert found[1].cache[-1]["hits"] == SIZE
    assert found[2] == 21 * 3  # all hits of evaluations


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            AlwaysDropout(),
            r"layer 1 \(AlwaysDropout\) gives a batch other values when it runs again: "
            "it draws random numbers in eval mode",
        ),
        (
            Mixing(),
            r"layer 1 \(Mixing\) gives a row other values alone than in its batch: it "
            "mixes rows",
        ),
    ],
)
def test_a_layer_that_draws_or_mixes_is_named(layer, text, slots):
    where = (
        r"CacheConfig\.debug: expected sample \d+ computed again at boundary 3 as it "
        r"is in the cache, got tensor 0: norm of the difference \S+, of the values \S+;"
    )
    engine = engine_of(layer, slots=slots, debug=True)
    with pytest.raises(ValueError, match=f"{where} {text}"):
        train(engine)
    # Those of the first epoch, which found nothing, are all.
    assert len(engine.history.epochs) == 1


def test_it_is_named_with_ragged_rows_too():
    ragged = pt.Ragged(lambda inputs: torch.full((len(inputs),), inputs.shape[1]))
    layers = [nn.Tanh().eval(), Mixing().eval()]
    prefix = FrozenPrefix(
        layers, 2, Workers(1), Clock(), seed=0, ragged=ragged, debug=True
    )
    cache = ActivationCache.create(
        run_id="run",
        num_samples=SIZE,
        slot_bytes=1024,
        budget_bytes=1 << 20,
        ragged=True,
    )
    inputs, ids = torch.randn(SIZE, 5, 3), torch.arange(SIZE)
    at = DrawPosition(0, 0)
    prefix(lambda: inputs, ids, cache, position=at)
    part = slice(0, 4)
    with pytest.raises(ValueError, match=r"layer 1 \(Mixing\) gives a row other"):
        prefix(lambda: inputs[part], ids[part], cache, position=at)


@pytest.mark.parametrize("layer", [AlwaysDropout(), Mixing()])
def test_it_is_named_in_an_evaluation_too(layer):
    engine, dev = engine_of(layer, debug=True), ToySet(21, seed=2)
    with engine, pytest.raises(ValueError, match=f"{type(layer).__name__}.* gives a"):
        engine.prepare(ToySet(SIZE), BATCH)
        engine.evaluate(dev, name="dev")
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(SIZE), BATCH):
                engine.step(batch)
        engine.evaluate(dev, name="dev")
    assert len(engine.history.epochs) == 1


class Last(nn.Module):
    """Last bits that differ from one call to the next."""

    def forward(self, x):
        return torch.where(torch.rand_like(x) < 0.5, x, x.nextafter(x + 1))


@pytest.mark.parametrize("kept", [False, True])
def test_an_evaluation_repeats_bits_unless_another_run_made_the_records(kept, tmp_path):
    engine = engine_of(Last(), debug=True, directory=tmp_path if kept else None)
    dev, error = ToySet(21, seed=2), None
    with engine:
        engine.prepare(ToySet(SIZE), BATCH)
        try:
            engine.evaluate(dev, name="dev")
            for _ in engine.epochs(4):
                for batch in engine.batches(ToySet(SIZE), BATCH):
                    engine.step(batch)
                engine.evaluate(dev, name="dev")
        except ValueError as raised:
            error = str(raised)
    if kept:
        assert error is None
    else:
        assert "layer 1 (Last) gives a batch other values" in error


def test_the_first_tensor_that_differs_is_named():
    engine = engine_of(Pair(), WrongSecond(), Joined(), frozen=3, debug=True)
    text = r"at boundary 3 .* got tensor 1: \d of 8 values; layer 2 \(WrongSecond\)"
    with pytest.raises(ValueError, match=text):
        train(engine)


def test_a_view_is_named_with_its_sample():
    with pytest.raises(ValueError, match=r"sample \d+ in view 0 computed again at "):
        train(engine_of(Mixing(), debug=True, views=2))


def test_a_frozen_weight_that_changes_within_a_pass_is_named():
    def change(model):
        with torch.no_grad():
            model[2].up.weight.mul_(2.0)

    with pytest.raises(ValueError, match="layer 2 was changed after the pass had beg"):
        train(engine_of(nn.Tanh(), debug=True), change=change)


def test_what_no_layer_shows_is_said_to_be_elsewhere(monkeypatch):
    monkeypatch.setitem(SETTING, "by", 0.0)

    def change(model):
        SETTING["by"] = 1.0

    with pytest.raises(ValueError, match="no layer gives other values when it runs"):
        train(engine_of(Shifting(), debug=True), change=change)


def test_kept_records_of_other_code_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(SETTING, "by", 0.0)
    train(engine_of(Shifting(), directory=tmp_path))
    SETTING["by"] = 1.0
    with pytest.raises(ValueError, match="its code has changed since the record was"):
        train(engine_of(Shifting(), directory=tmp_path, debug=True))


def mixes(rank):
    train(engine_of(Mixing(), debug=True))


@pytest.mark.distributed
def test_every_rank_ends_when_one_finds_a_fault():
    with Ranks(mixes, 2) as ranks:
        outcomes = ranks.outcomes()
    assert not any(ok for ok, _ in outcomes.values())
    assert any("it mixes rows" in text for _, text in outcomes.values())


# -- which layer it is --------------------------------------------------------


def cause(layers, inputs, row=0):
    @contextlib.contextmanager
    def scope(number):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(number)
            yield

    return faulty_layer(layers, inputs, row, scope=scope, differ=difference)


class InPlace(nn.Module):
    def forward(self, x):
        return x.add_(1.0)


def test_layers_that_work_in_place_are_not_blamed():
    inputs = torch.randn(5, 3)
    before = inputs.clone()
    assert cause([InPlace(), nn.ReLU(inplace=True), InPlace()], inputs) is None
    assert torch.equal(inputs, before) and rows_of(inputs) == 5
    assert cause([InPlace(), Mixing(), InPlace()], inputs, 3).startswith("layer 1 ")
    assert cause([InPlace(), AlwaysDropout(), InPlace()], inputs).startswith("layer 1 ")
    drops = AlwaysDropout(inplace=True)
    assert cause([nn.Tanh(), drops], inputs).startswith("layer 1 ")


class Fixed(nn.Module):
    """Hands on what has no rows, too."""

    def forward(self, x):
        return x, torch.tensor(2.0), torch.ones(2, 2)


class Scaled(nn.Module):
    def forward(self, x, scale, more):
        return x * scale * more.sum()


def test_fixed_values_are_not_blamed():
    inputs = torch.randn(5, 3)
    assert cause([Fixed(), Scaled()], inputs, 3) is None
    assert cause([Fixed(), Scaled(), Mixing()], inputs, 3).startswith("layer 2 ")


def test_a_clean_layer_is_blamed_for_nothing():
    assert cause(list(toy_model(3)), torch.randn(7, 4), row=6) is None


class Turning(nn.Module):
    """Gives complex numbers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(8, 8, dtype=torch.complex64, generator=generator)
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return torch.tanh(x.to(torch.complex64) @ self.weight / 4)


class Absolute(nn.Module):
    def forward(self, x):
        return x.abs()


@pytest.mark.parametrize("cache", [{"debug": True}, {"audit_every": 1}], ids=str)
def test_complex_activations_are_compared_within_rounding(cache):
    first, *others = toy_model(2)
    engine = pt.PipeTransformer(
        nn.Sequential(first, Turning(), Absolute(), *others),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2]),
        config=config(cache=pt.CacheConfig(**cache)),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(SIZE), BATCH):
                engine.step(batch)
    assert [epoch.cache_hits for epoch in engine.history.epochs] == [0, SIZE, SIZE]


def test_complex_values_that_are_apart_are_told():
    imaginary = torch.tensor([[0.0, 1.0, torch.nan, 2.0]])
    one = torch.complex(torch.ones(1, 4), imaginary)
    near = torch.complex(torch.ones(1, 4), imaginary * (1 + 1e-6))
    assert difference([one], [near]) is None
    assert difference([one.conj()], [near.conj()]) is None
    assert difference([one], [near], bits=True) is not None
    assert "norm of the difference" in difference([one], [one * 1j])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bits_and_rounding_are_told_apart(dtype):
    one = torch.tensor([[-torch.inf, 1.0, 2.0]], dtype=dtype)
    near = one * (1 + torch.finfo(dtype).eps)
    assert difference([one], [one.clone()], bits=True) is None
    assert difference([one], [near]) is None
    assert "tensor 0: norm of the difference" in difference([one], [near], bits=True)
    assert "tensor 0: " in difference([one], [one.nan_to_num()])
    assert "tensor 1: " in difference([one, one], [one, 2 * one])
