"""Dicts and other structures that frozen layers hand on are cached by their rows."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config
from tests.engine.test_cache_debug import Mixing
from tests.engine.test_fixed_values import Equal
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model

SIZE, BATCH, EPOCHS = 24, 12, 4


SEEN = {"rows": 0}  # of the file: a setting of the layer is in its fingerprint


class Hand(nn.Module):
    """Hands on two tensors with rows in a structure; counts its rows."""

    def __init__(self, layer, more):
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x):
        SEEN["rows"] += len(x)
        value = self.layer(x)
        return {"x": [value, None], "by": self.more(), "again": {"half": value / 2}}


class Take(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, given):
        assert list(given) == ["x", "by", "again"] and given["x"][1] is None
        by = given["by"]
        scale = by.sum() if isinstance(by, torch.Tensor) else float(len(str(by)))
        return self.layer(given["x"][0] * scale + given["again"]["half"])


def train(more, slots=1, *, mixing=False, evaluates=False, change=None, **cache):
    """Return losses, what the cache did, rows that were computed, and a refusal."""
    first, second, third, *others = toy_model(3)
    hand = Hand(nn.Sequential(second, *([Mixing()] if mixing else [])), more)
    engine = pt.PipeTransformer(
        nn.Sequential(first, hand, Take(third), *others),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2]),
        config=config(
            cache=pt.CacheConfig(**cache),
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
    )
    losses, rows = [], []
    with engine:
        engine.prepare(ToySet(SIZE), BATCH)
        for epoch in engine.epochs(EPOCHS):
            SEEN["rows"] = 0
            if change is not None:
                change(epoch)
            for batch in engine.batches(ToySet(SIZE), BATCH):
                losses.append(engine.step(batch).item())
            rows.append(SEEN["rows"])
            if evaluates:
                losses.append(engine.evaluate(ToySet(21, seed=2), name="dev")["loss"])
        refusal = engine._open().active().prefix.refusal
    return losses, [each["hits"] for each in engine.history.cache], rows, refusal


def plain():
    return "plain"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("more", [plain, lambda: torch.arange(6.0), lambda: None])
def test_a_structure_is_cached_and_made_whole_again(more, slots):
    losses, hits, rows, refusal = train(more, slots, evaluates=True)
    expected, _, computed, _ = train(more, slots, evaluates=True, enabled=False)
    assert losses == expected and refusal is None
    assert hits == [0, SIZE, SIZE, SIZE]
    assert rows[1:] == [0] * (EPOCHS - 1) and min(computed) >= SIZE


def test_records_of_an_earlier_run_serve_once_the_form_is_known(tmp_path):
    first = train(plain, directory=tmp_path)
    again = train(plain, directory=tmp_path)
    assert again[0] == first[0]
    # The first batch of a process is computed: it shows what is fixed.
    assert again[1] == [SIZE - BATCH, SIZE, SIZE, SIZE]
    other = train(lambda: "other", directory=tmp_path)
    assert other[1] == [0, SIZE, SIZE, SIZE]


def test_debug_mode_computes_again():
    losses, hits, rows, _ = train(plain, debug=True)
    assert losses == train(plain)[0]
    assert hits == [0, SIZE, SIZE, SIZE] and min(rows) >= SIZE
    with pytest.raises(ValueError, match=r"CacheConfig.debug: .* at boundary 2 .* got"):
        train(plain, debug=True, mixing=True)


FIXED = [1.0]  # of the module: what a function holds is part of the fingerprints


def fixed():
    return torch.tensor(FIXED[0])


def test_what_is_fixed_and_changes_ends_the_use_of_the_cache(caplog):
    def change(epoch):
        FIXED[0] = 1.0 + (epoch == 2)

    def run(**cache):
        return train(fixed, change=change, **cache)

    # As many as its first epoch stored, until a batch is computed again: an audit's.
    losses, hits, _, refusal = run(audit_every=1)
    assert hits[:2] == [0, SIZE] and hits[3] == 0
    assert "its record (another structure or other fixed values)" in caplog.text
    assert losses == run(enabled=False)[0]
    with pytest.raises(ValueError, match="got another structure or other fixed val"):
        run(debug=True)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_codec_is_measured_and_used(slots):
    losses, hits, rows, _ = train(plain, slots, codec="fp16")
    assert losses == pytest.approx(train(plain, slots)[0], rel=1e-2)
    assert hits[-1] == SIZE and rows[-1] == 0


def test_what_has_no_text_is_not_cached():
    losses, hits, _, refusal = train(lambda: Equal("a"))
    assert "layer 1 returns more than tensors with one row per sample" in refusal
    assert hits == [0] * EPOCHS


def train_as_rank(_rank):
    return train(plain)[:2]


@pytest.mark.distributed
def test_replicas_share_records():
    for losses, hits in run_ranks(train_as_rank, 2):
        assert hits == [0, SIZE, SIZE, SIZE]
        assert len(losses) == EPOCHS * SIZE // BATCH


def padded(samples):
    """Pad rows of two lengths to the longest of their batch."""
    rows, targets = zip(*samples, strict=True)
    lengths = torch.tensor([3 + int(target) % 2 for target in targets])
    longest = int(lengths.max())
    kept = torch.arange(longest) < lengths[:, None]
    values = torch.stack([row[:1].expand(longest) for row in rows]) * kept
    return (values, kept), torch.tensor(targets)


class Ragged(nn.Module):
    """Hands on hidden states and the mask in a dict, and what it is asked to."""

    def __init__(self, more):
        super().__init__()
        self.table, self.more = nn.Linear(1, 4), more

    def forward(self, values, kept):
        hidden = self.table(values[:, :, None]) * kept[:, :, None]
        return {"hidden": hidden, "kept": kept, "more": self.more(values)}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, given):
        return self.out(given["hidden"].sum(1) / given["kept"].sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("more", "hits"), [(lambda x: None, SIZE), (lambda x: x.shape[1], 0)]
)
def test_of_padded_rows_numbers_may_come_of_lengths(more, hits):
    def run(**cache):
        torch.manual_seed(0)
        engine = pt.PipeTransformer(
            nn.Sequential(Ragged(more), Head()),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Schedule([1]),
            ragged=pt.Ragged(lambda inputs: inputs[1].sum(1)),
            config=config(cache=pt.CacheConfig(**cache)),
        )
        with engine:
            losses = [
                engine.step(batch).item()
                for _ in engine.epochs(3)
                for batch in engine.batches(ToySet(SIZE), 4, collate_fn=padded)
            ]
        return losses, engine.history.cache[-1]["hits"]

    losses, found = run()
    assert found == hits
    assert losses == pytest.approx(run(enabled=False)[0], rel=1e-5)


# -- sets of other shapes -----------------------------------------------------------


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return {"x": self.layer(x), "positions": torch.arange(x.shape[1])}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, given):
        return self.layer((given["x"] + given["positions"][None, :, None]).mean(1))


class Sequences(torch.utils.data.Dataset):
    def __init__(self, length):
        draws = torch.Generator().manual_seed(length)
        self.rows = torch.randn(SIZE, length, 4, generator=draws)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.rows[index], index % 3

    def input_key(self, index, epoch):
        return index


def test_an_evaluation_set_of_another_length_has_a_form_of_its_own():
    torch.manual_seed(0)
    engine = pt.PipeTransformer(
        nn.Sequential(Positions(), nn.Identity(), Pooled()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([1]),
        config=config(),
    )
    told = []
    with engine:
        for _ in engine.epochs(EPOCHS):
            for batch in engine.batches(Sequences(5), BATCH):
                engine.step(batch)
            told.append(engine.evaluate(Sequences(7), name="dev")["loss"])
            assert engine._open().active().prefix.refusal is None
            assert len(engine._open().active().prefix._forms) == 2
    assert [each["hits"] for each in engine.history.cache] == [0, *[SIZE] * 3]
    assert len(set(told)) == EPOCHS


class Spread(nn.Module):
    """Multiplies by a sparse operator that belongs to no row."""

    def __init__(self, kind):
        super().__init__()
        matrix = torch.eye(4) + torch.ones(4, 4).triu() / 8
        self.operator = matrix.to_sparse() if kind == "coo" else matrix.to_sparse_csr()
        self.inner = nn.Linear(4, 8)

    def forward(self, x):
        return self.inner((self.operator @ x.T).T)


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_layers_with_sparse_operators_freeze_and_are_cached(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Spread(kind), nn.Tanh(), nn.Linear(8, 3))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, 0, 1]),
        config=config(cache=pt.CacheConfig(admission="always")),
    )
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    assert [each.cache_hits for each in engine.history.epochs] == [0, 0, 0, 24]
