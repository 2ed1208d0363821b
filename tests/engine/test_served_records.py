"""Which activations of the frozen prefix are read back, and which computed again."""

import contextlib
import itertools

import pytest
import torch

import pipetransformer as pt
from pipetransformer.autocache import fingerprint_chain, values_context
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of
from tests.support.toy import ToySet, accuracy, toy_model

FROZEN = 2  # units: three layers


def casting(dtype):
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype)


def count_prefix_rows(engine):
    """Return a list that grows by the rows of each call of the first layer."""
    rows = []
    first = model_of(engine)[0]
    first.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    return rows


def train_under(dtypes, *, slots=1, caches=True):
    """Train a frozen model, each epoch under the autocast given; return its records."""
    settings = config(
        cache=pt.CacheConfig(enabled=caches),
        pipe=pt.PipeConfig(num_slots=slots),
        plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
    )
    engine = make_engine(freeze=schedule(FROZEN), config=settings)
    with engine:
        for epoch in engine.epochs(len(dtypes)):
            for batch in engine.batches(ToySet(24), 12):
                with casting(dtypes[epoch]):
                    engine.step(batch)
    return engine.history.epochs


@pytest.mark.parametrize("slots", [1, 2])
def test_records_serve_only_the_autocast_they_were_made_under(slots):
    dtypes = [
        None,
        torch.bfloat16,
        torch.bfloat16,
        torch.float16,
        None,
        None,
        torch.bfloat16,
    ]
    cached = train_under(dtypes, slots=slots)
    plain = train_under(dtypes, slots=slots, caches=False)
    hits = [now == before for before, now in itertools.pairwise([0, *dtypes])]
    assert [e.cache_hits for e in cached] == [24 * hit for hit in hits]
    for mine, other in zip(cached, plain, strict=True):
        assert mine.train_loss == pytest.approx(other.train_loss, rel=1e-6)


@pytest.mark.parametrize("slots", [1, 2])
def test_an_evaluation_reads_what_the_last_one_computed(slots):
    settings = config(
        pipe=pt.PipeConfig(num_slots=slots), plan=pt.PlanConfig(num_stages=slots)
    )
    engine = make_engine(freeze=schedule(FROZEN), config=settings)
    test_set, rows = ToySet(21, seed=2), count_prefix_rows(engine)
    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
            rows.clear()
            results = []
            for dtype in (None, None, torch.bfloat16, torch.bfloat16, None):
                with casting(dtype):
                    results.append(engine.evaluate(test_set, {"accuracy": accuracy}))
            plain, same, cast, same_cast, again = results
            # The second epoch finds what the first left: a slot keeps one record.
            assert sum(rows) == 21 * (3 if epoch == 0 else 2)
            assert plain == same == again and cast == same_cast
            assert plain["loss"] != cast["loss"]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def product_precision(precision):
    products = torch.backends.mkldnn.matmul
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        yield
    finally:
        products.fp32_precision = before


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: default_dtype(torch.float64),
        lambda: product_precision("bf16"),
    ],
    ids=["bfloat16", "float16", "default dtype", "precision of products"],
)
def test_what_changes_frozen_outputs_changes_every_fingerprint(change):
    layers = list(toy_model())
    plain = fingerprint_chain(layers, 4, context=values_context())
    with change():
        other = fingerprint_chain(layers, 4, context=values_context())
    assert all(a != b for a, b in zip(plain, other, strict=True))
    assert fingerprint_chain(layers, 4, context=values_context()) == plain


def test_two_kinds_of_autocast_differ_and_a_nested_off_is_off():
    with torch.autocast("cpu", torch.bfloat16):
        first = values_context()
        with torch.autocast("cpu", enabled=False):
            nested = values_context()
    with torch.autocast("cpu", torch.float16):
        second = values_context()
    assert len({first, second, nested}) == 3 and nested == values_context()
