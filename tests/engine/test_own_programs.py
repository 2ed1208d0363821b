"""Programs as people write them: losses, inputs, batches and loops of their own."""

import contextlib
import logging
import threading

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.loop.microbatch_loss import zero_of
from pipetransformer.replica import frozen_prefix
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model

TWO = pt.PlanConfig(num_stages=1, num_microbatches=1, replicas="all")
ALONE = pt.PlanConfig(num_stages=1, num_microbatches=1)


def weights_of(engine):
    return [p.detach().clone() for p in model_of(engine).parameters()]


# -- bare inputs -------------------------------------------------------------------


def train_bare(rank, loop):
    """Train on the bare halves of batches of which replicas have unequal shares."""
    settings = config(plan=ALONE, pipe=pt.PipeConfig(num_slots=1))
    engine = make_engine(freeze=pt.freeze.Never(), dtype=torch.float64, config=settings)
    with engine:
        for _ in engine.epochs(1):
            # 7 samples in batches of 3 over 2 replicas: one has none of the last.
            for batch in engine.batches(ToySet(7, dtype=torch.float64), 3):
                if loop == "step on the batch":
                    engine.step(batch)
                elif loop == "step on its halves":
                    engine.step(batch.inputs, batch.targets)
                elif loop == "step on its halves where there are rows":
                    halves = (batch.inputs, batch.targets) if batch.rows else (batch,)
                    engine.step(*halves)
                else:
                    out = engine.model(batch.inputs)
                    empty = batch.rows == 0
                    loss = nn.functional.cross_entropy
                    engine.backward(out if empty else loss(out, batch.targets))
                    engine.update()
        weights = weights_of(engine)
    return weights, engine.history.epochs[0].train_loss


@pytest.mark.distributed
@pytest.mark.parametrize(
    "loop",
    [
        "step on its halves",
        "step on its halves where there are rows",
        "model and backward",
    ],
)
def test_bare_inputs_are_weighted_by_the_rows_of_all_replicas(loop):
    expected, found = (
        run_ranks(train_bare, 2, each)[0] for each in ("step on the batch", loop)
    )
    assert found[1] == pytest.approx(expected[1], rel=1e-9)
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Waves(nn.Module):
    """A layer with complex weights and real outputs."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(4, 8, dtype=torch.complex128, generator=generator)
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


def train_waves(rank):
    engine = pt.PipeTransformer(
        nn.Sequential(Waves(), nn.Linear(8, 3, dtype=torch.float64)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(plan=TWO, pipe=pt.PipeConfig(num_slots=1)),
    )
    torch.manual_seed(0)
    nn.init.normal_(model_of(engine)[1].weight)
    nn.init.zeros_(model_of(engine)[1].bias)
    with engine:
        for _ in engine.epochs(2):
            # The last batch has one row, so one of two replicas has none.
            for batch in engine.batches(ToySet(7, dtype=torch.float64), 3):
                engine.step(batch)
        return weights_of(engine)


@pytest.mark.distributed
def test_a_replica_without_rows_trains_complex_weights_with_the_others():
    (expected,), (found, _) = (run_ranks(train_waves, size) for size in (1, 2))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_loss_of_nothing_has_gradients_of_zero_for_complex_outputs_too():
    whole = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    loss = zero_of({"a": whole.conj() * 2, "b": torch.arange(2)})
    loss.backward()
    assert loss.shape == () and float(loss) == 0
    assert torch.equal(whole.grad, torch.zeros_like(whole))


def test_targets_beside_a_batch_are_refused():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        batch = next(engine.batches(ToySet(8), 4))
        with pytest.raises(TypeError, match=r"beside a batch, which has its own; step"):
            engine.step(batch, batch.targets + 0)
        assert engine.step(batch, batch.targets).isfinite()  # its own


def step_outside_of_passes(rank):
    settings = config(plan=ALONE, pipe=pt.PipeConfig(num_slots=1))
    engine = make_engine(freeze=pt.freeze.Never(), dtype=torch.float64, config=settings)
    data = ToySet(7, dtype=torch.float64)
    mine = slice(0, 2) if rank == 0 else slice(2, 7)
    with engine:
        engine.prepare(data, 6)
        engine.step(data.x[mine], data.y[mine])
        return weights_of(engine)


@pytest.mark.distributed
def test_bare_inputs_outside_of_passes_are_weighted_by_their_rows():
    found, other = run_ranks(step_outside_of_passes, 2)
    model, data = toy_model(dtype=torch.float64), ToySet(7, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    nn.functional.cross_entropy(model(data.x), data.y).backward()
    optimizer.step()
    for a, b, c in zip(found, other, model.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c.detach(), rtol=1e-9, atol=1e-12)


def test_bare_inputs_without_rows_are_refused():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.prepare(ToySet(8), 4)
        with pytest.raises(ValueError, match="a tensor with one row per sample, got"):
            engine.step(torch.tensor(1.0), torch.tensor(1))


# -- batches -----------------------------------------------------------------------


class Rebuild(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale


def train_without_targets(rank, form):
    def collate(samples):
        x = torch.stack([x for x, _ in samples])
        if form == "a pair with None":
            return x, None
        return {"x": x, "scale": 0.5, "labels": x}

    engine = pt.PipeTransformer(
        nn.Sequential(Rebuild(), nn.Linear(4, 4)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=lambda out, _: out.square().mean(),
        freeze=pt.freeze.Never(),
        config=config(plan=ALONE, pipe=pt.PipeConfig(num_slots=1)),
    )
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(9), 4, collate_fn=collate):
                engine.step(batch)
        return weights_of(engine)


@pytest.mark.distributed
@pytest.mark.parametrize("form", ["a pair with None", "a mapping with a number"])
def test_a_share_without_rows_may_hold_more_than_tensors(form):
    both = run_ranks(train_without_targets, 2, form)
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batch_norm_trains_on_the_smallest_batches(batch_size):
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
    engine = pt.PipeTransformer(
        nn.Sequential(*layers),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    )
    with engine:
        for batch in engine.batches(ToySet(6), batch_size):
            assert engine.step(batch).isfinite()


def with_table(samples):
    x = torch.stack([x for x, _ in samples])
    return {"x": x, "scale": torch.ones(4), "labels": torch.stack([x[0] for x in x])}


def engine_with_table():
    return pt.PipeTransformer(
        nn.Sequential(Rebuild(), nn.Linear(4, 1)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=lambda out, y: (out[:, 0] - y).square().mean(),
        freeze=pt.freeze.Never(),
        config=config(plan=ALONE),
    )


def test_an_input_without_a_row_per_sample_is_refused_by_its_shape():
    text = r"inputs: expected 6 rows in each tensor, .* got shape \(4,\); let a layer"
    with engine_with_table() as engine:
        batches = engine.batches(ToySet(6), 6, collate_fn=with_table)
        with pytest.raises(ValueError, match=text):
            engine.step(next(batches))


# -- losses and optimizers ---------------------------------------------------------


def test_an_optimizer_of_parameters_of_the_loss_is_refused():
    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(outputs * self.scale, targets)

    loss = Margin()
    text = r"got one of the loss, of shape \(3,\), which would be neither reduced"
    with pytest.raises(ValueError, match=text):
        pt.PipeTransformer(
            toy_model(2),
            optimizer=lambda params: torch.optim.SGD([*params, loss.scale], lr=0.1),
            loss=loss,
            freeze=pt.freeze.Never(),
        )


@pytest.mark.parametrize("more", [False, True])
def test_an_optimizer_may_have_parameters_that_get_no_gradient(more, caplog):
    model, unused = toy_model(2), nn.Linear(2, 2)
    model[0].requires_grad_(False)
    whole = [*model.parameters(), *(unused.parameters() if more else ())]
    pt.PipeTransformer(
        model,
        optimizer=lambda _: torch.optim.SGD(whole, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
    )
    text = "optimizer: 2 of its parameters are not the model's, the first of shape"
    assert (text in caplog.text) == more


def test_a_loss_is_judged_by_the_first_batch_of_two_rows(caplog):
    weights = torch.tensor([1.0, 20.0, 1.0])
    settings = config(plan=ALONE)
    engine = make_engine(
        freeze=pt.freeze.Never(),
        loss=nn.CrossEntropyLoss(weight=weights),
        config=settings,
    )
    data = ToySet(8)
    with engine, caplog.at_level(logging.WARNING):
        engine.prepare(data, 8)
        for row in range(3):
            engine.step(data.x[row : row + 1], data.y[row : row + 1])
        assert "a mean over rows" not in caplog.text
        engine.step(data.x, data.y)
        assert caplog.text.count("loss: expected a mean over rows") == 1
        engine.step(data.x, data.y)
    assert caplog.text.count("loss: expected a mean over rows") == 1


def test_a_sum_over_one_row_is_refused_at_once():
    engine = make_engine(
        freeze=pt.freeze.Never(),
        loss=nn.CrossEntropyLoss(reduction="sum"),
        config=config(plan=ALONE),
    )
    data = ToySet(8)
    with engine:
        engine.prepare(data, 8)
        with pytest.raises(ValueError, match="loss: expected a mean over rows"):
            engine.step(data.x[:1], data.y[:1])


# -- the cache ---------------------------------------------------------------------


class Noisy(nn.Module):
    """Takes a level of noise as a plain value beside the rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x, level):
        return self.linear(x) * level


@pytest.mark.parametrize("changes", [True, False])
def test_a_plain_value_among_the_inputs_is_part_of_what_the_cache_looks_up(changes):
    def train(caches):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(Noisy(), nn.Linear(8, 8), nn.Linear(8, 3))
        engine = pt.PipeTransformer(
            model,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss=nn.CrossEntropyLoss(),
            freeze=schedule(0, 1, 1, 1),
            config=config(plan=ALONE, cache=pt.CacheConfig(enabled=caches)),
        )
        losses = []
        with engine:
            for epoch in engine.epochs(4):
                level = 1.0 + epoch if changes else 1.0

                def collate(samples, level=level):
                    x, y = zip(*samples, strict=True)
                    return {"x": torch.stack(x), "level": level}, torch.stack(y)

                for batch in engine.batches(ToySet(12), 4, collate_fn=collate):
                    losses.append(engine.step(batch))
        return losses, [epoch.cache_hits for epoch in engine.history.epochs]

    (found, hits), (expected, _) = train(True), train(False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert hits == ([0, 0, 0, 0] if changes else [0, 0, 12, 12])


def test_inputs_that_nothing_tells_apart_are_not_cached(caplog):
    def collate(samples):
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "level": 1.0, "key": object()}, torch.stack(y)

    class Keyed(Noisy):
        def forward(self, x, level, key):
            return super().forward(x, level)

    engine = pt.PipeTransformer(
        nn.Sequential(Keyed(), nn.Linear(8, 8), nn.Linear(8, 3)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 1, 1),
        config=config(plan=ALONE),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(8), 4, collate_fn=collate):
                engine.step(batch)
    assert [epoch.cache_hits for epoch in engine.history.epochs] == [0, 0, 0]
    assert "whether that is the same again cannot be told" in caplog.text


class Flagged(nn.Module):
    """Hands on whether a batch has a large value: no two batches need agree."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return self.linear(x), bool(x.max() > 50)


class Unflag(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, hidden, flag):
        return self.linear(hidden)


def evaluate_two_sets(rank):
    engine = pt.PipeTransformer(
        nn.Sequential(Flagged(), Unflag()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 1),
        config=config(plan=ALONE, pipe=pt.PipeConfig(num_slots=1)),
    )
    uneven, even = ToySet(32), ToySet(32, seed=2)
    uneven.x[0] = 100.0  # of the first replica's first micro-batch alone
    found = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
            for name, data in (("uneven", uneven), ("even", even)):
                found.append(engine.evaluate(data, name=name)["loss"])
        refusal = run_of(engine) and engine._coordinator.replica.prefix.refusal
    return found, refusal


@pytest.mark.distributed
def test_ranks_that_disagree_on_the_cache_go_on_evaluating():
    (found, refused), (other, accepted) = run_ranks(evaluate_two_sets, 2)
    assert refused is not None and accepted is None, "they were to disagree"
    assert found == other


class Wide(nn.Module):
    """A head that notes how wide its rows are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.widths = []

    def forward(self, hidden, mask):
        self.widths.append(hidden.shape[1])
        return self.linear((hidden * mask[..., None]).sum(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, tokens, mask):
        return self.table(tokens), mask


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, mask):
        return self.linear(hidden), mask


class Lines(torch.utils.data.Dataset):
    """Eight lines of three words, then eight of nine."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((3 if i < 8 else 9,), 1 + i), torch.tensor(i % 2)


def padded(samples):
    rows, targets = zip(*samples, strict=True)
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return (tokens, tokens != 0), torch.stack(targets)


def test_micro_batches_that_are_read_at_once_keep_their_own_length(monkeypatch):
    head = Wide()
    engine = pt.PipeTransformer(
        nn.Sequential(Words(), Hidden(), Hidden(), head),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0, 2),
        ragged=pt.Ragged(lambda inputs: inputs[1].sum(1)),
        config=config(
            plan=pt.PlanConfig(num_stages=2), pipe=pt.PipeConfig(num_slots=2)
        ),
    )
    meet, met, hashed = threading.Barrier(2), [], frozen_prefix.hash_ragged_rows

    def both_hashed(rows):
        found = hashed(rows)
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(meet.wait(timeout=5))
        return found

    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(Lines(), 8, collate_fn=padded):
                engine.step(batch)
            engine.evaluate(Lines(), collate_fn=padded, name="dev")
            if epoch == 1:
                head.widths.clear()
                monkeypatch.setattr(frozen_prefix, "hash_ragged_rows", both_hashed)
                engine.evaluate(Lines(), collate_fn=padded, name="dev")
    assert sorted(met) == [0, 1], "both were to be read at once"
    assert sorted(head.widths) == [3, 9]
