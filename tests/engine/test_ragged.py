"""Text padded to the longest of its batch: every sample is found from then on."""

import logging

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import Ragged
from tests.engine.scenario import config
from tests.support.private import run_of
from tests.support.ranks import run_ranks

SIZE, WIDTH = 24, 8
FROZEN_FROM = 1  # epoch; it is the one that fills the cache


class Embed(nn.Module):
    """Words, and with `extra` one more that stands before all others."""

    def __init__(self, extra=False):
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.extra = extra

    def forward(self, tokens, mask):
        if self.extra:
            tokens = nn.functional.pad(tokens, (1, 0), value=1)
            mask = nn.functional.pad(mask, (1, 0), value=True)
        return self.table(tokens), mask


class Mix(nn.Module):
    """Attention over the valid tokens, then a linear map."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask):
        scores = hidden @ hidden.transpose(1, 2) / WIDTH
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        mixed = scores.softmax(-1) @ hidden
        return hidden + torch.tanh(self.linear(mixed)), mask


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, hidden, mask):
        kept = hidden * mask[..., None]
        return self.linear(kept.sum(1) / mask.sum(1, keepdim=True))


def text_model(extra=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Embed(extra), Mix(), Mix(), Mix(), Head()).double()


def lengths_of(inputs):
    return inputs[1].sum(1)


class Texts(torch.utils.data.Dataset):
    """Sentences of 2 to 9 words."""

    def __init__(self, size=SIZE, *, seed=3, vouch=False):
        drawn = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 10, (size,), generator=drawn).tolist()
        self.rows = [torch.randint(1, 20, (n,), generator=drawn) for n in lengths]
        self.loads = 0
        if vouch:
            self.inputs = lambda i: self[i][0]
            self.targets = lambda i: self.rows[i].sum() % 2
            self.input_key = lambda i, epoch: i

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.loads += 1
        return self.rows[i], self.rows[i].sum() % 2


def pad_inputs(rows):
    length = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, tokens != 0


def pad(samples):
    if isinstance(samples[0], tuple):
        rows, targets = zip(*samples, strict=True)
        return pad_inputs(rows), torch.stack(targets)
    if samples[0].dim():
        return pad_inputs(samples)
    return torch.stack(samples)


def make_engine(ragged, *, caches=True, extra=False, boundaries=(0, 2, 2, 3), **plan):
    stages = plan.get("num_stages", 1)
    return pt.PipeTransformer(
        text_model(extra),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(list(boundaries)),
        ragged=ragged,
        config=config(
            cache=pt.CacheConfig(enabled=caches),
            pipe=pt.PipeConfig(num_slots=stages),
            plan=pt.PlanConfig(**plan),
        ),
    )


def train(engine, dataset, epochs=4):
    """Return train losses, hits and evaluations of each epoch."""
    losses = []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(dataset, 8, collate_fn=pad):
                engine.step(batch)
            found = engine.evaluate(Texts(10, seed=5), collate_fn=pad, name="dev")
            losses.append(found["loss"])
        run = run_of(engine)
        used = [c.used_bytes for c in run.caches._caches.values() if c is not None]
    epochs = engine.history.epochs
    return {
        "dev": losses,
        "losses": [e.train_loss for e in epochs],
        "hits": [e.cache_hits for e in epochs],
        "misses": [e.cache_misses for e in epochs],
        "used": used,
    }


@pytest.mark.parametrize(
    "plan",
    [
        dict(num_stages=1),
        dict(num_stages=2, num_microbatches=4),
        dict(num_stages=3, num_microbatches=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("vouch", [False, True], ids=["hashed", "vouched"])
def test_every_sample_is_found_and_losses_are_those_of_recomputing(plan, vouch):
    ragged = Ragged(lengths_of)
    found = train(make_engine(ragged, **plan), Texts(vouch=vouch))
    plain = train(make_engine(ragged, caches=False, **plan), Texts(vouch=vouch))
    # At boundary 3 records of boundary 2 are found and advanced.
    assert found["hits"] == [0, 0, SIZE, SIZE]
    assert found["misses"] == [0, SIZE, 0, 0]
    for name in ("losses", "dev"):
        assert found[name] == pytest.approx(plain[name], rel=1e-12)
    assert found["losses"][3] < found["losses"][0]


def test_bytes_of_the_cache_are_those_of_the_valid_tokens():
    dataset = Texts()
    found = train(make_engine(Ragged(lengths_of)), dataset)
    tokens = sum(len(row) for row in dataset.rows)
    least, header = tokens * (WIDTH * 8 + 1), 240 + 16 + 64
    assert least < found["used"][0] <= least + SIZE * header


class Average(Mix):
    """Where no token is valid it averages the padding, as finite masks do."""

    def forward(self, hidden, mask):
        scores = (hidden @ hidden.transpose(1, 2) / WIDTH).masked_fill(
            ~mask[:, None, :], -1e9
        )
        return hidden + torch.tanh(self.linear(scores.softmax(-1) @ hidden)), mask


class First(nn.Module):
    """Reads the first position, valid or not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, hidden, mask):
        return self.linear(hidden[:, 0])


@pytest.mark.parametrize("vouch", [False, True], ids=["hashed", "vouched"])
def test_texts_without_a_token_are_what_recomputing_them_gives(vouch):
    """Their padding is what the head reads, and it is of another length each time."""

    def run(caches):
        dataset = Texts(vouch=vouch)
        for index in (3, 7, 8):
            dataset.rows[index] = dataset.rows[index][:0]
        engine = pt.PipeTransformer(
            nn.Sequential(Embed(), Average(), Average(), First()).double(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Schedule([0, 2, 2, 2]),
            ragged=Ragged(lengths_of),
            config=config(cache=pt.CacheConfig(enabled=caches, admission="always")),
        )
        return train(engine, dataset)

    torch.manual_seed(0)
    found = run(True)
    torch.manual_seed(0)
    plain = run(False)
    assert sum(found["hits"]) > SIZE  # all but, at times, those three
    for name in ("losses", "dev"):
        assert found[name] == pytest.approx(plain[name], rel=1e-12)


def test_a_text_without_a_token_that_loads_on_its_own_is_told_by_its_padding(tmp_path):
    """A later run pads all texts to another length, which their keys do not tell."""

    def run(length, folder):
        class Padded(Stacked):
            def inputs(self, i):
                tokens = torch.zeros(length, dtype=torch.int64)
                tokens[: len(self.rows[i])] = self.rows[i]
                return tokens, tokens != 0

        dataset = Padded()
        for index in (3, 7, 8):
            dataset.rows[index] = dataset.rows[index][:0]
        torch.manual_seed(0)
        engine = pt.PipeTransformer(
            nn.Sequential(Embed(), Average(), Average(), First()).double(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Schedule([2, 2, 2]),
            ragged=Ragged(lengths_of),
            config=config(
                cache=pt.CacheConfig(
                    enabled=folder is not None,
                    admission="always",
                    directory=folder,
                    audit_every=0,
                )
            ),
        )
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(dataset, 8):
                    engine.step(batch)
        records = engine.history.epochs
        return [r.train_loss for r in records], sum(r.cache_hits for r in records)

    run(12, tmp_path)
    found, hits = run(16, tmp_path)
    plain, none = run(16, None)
    assert found == pytest.approx(plain, rel=1e-12) and none == 0
    assert hits >= 2 * (SIZE - 3)


class Stacked(Texts):
    """Sentences of one padded length, whose inputs load on their own."""

    def inputs(self, i):
        self.loads += 1
        tokens = torch.zeros(12, dtype=torch.int64)
        tokens[: len(self.rows[i])] = self.rows[i]
        return tokens, tokens != 0

    def targets(self, i):
        return self.rows[i].sum() % 2

    def input_key(self, i, epoch):
        return i

    def __getitem__(self, i):
        return self.inputs(i), self.targets(i)


def test_inputs_of_found_samples_are_not_loaded():
    dataset, loads, losses = Stacked(), [], []
    engine = make_engine(Ragged(lengths_of), boundaries=(0, 2, 2, 2))
    with engine:
        for _ in engine.epochs(4):
            before = dataset.loads
            for batch in engine.batches(dataset, 8):
                losses.append(float(engine.step(batch)))
            loads.append(dataset.loads - before)
    assert loads[1] >= SIZE and loads[2:] == [0, 0]
    expected = []
    engine = make_engine(Ragged(lengths_of), caches=False, boundaries=(0, 2, 2, 2))
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(dataset, 8):
                expected.append(float(engine.step(batch)))
    assert losses == pytest.approx(expected, rel=1e-12)


def train_on_a_rank(rank, vouch):
    engine = make_engine(Ragged(lengths_of))
    return train(engine, Texts(vouch=vouch))


@pytest.mark.distributed
@pytest.mark.parametrize("vouch", [False, True], ids=["hashed", "vouched"])
def test_replicas_of_a_node_share_ragged_records(vouch):
    alone = train(make_engine(Ragged(lengths_of)), Texts(vouch=vouch))
    outcomes = run_ranks(train_on_a_rank, 3, vouch)
    lead = outcomes[0]
    assert lead["hits"] == alone["hits"] and lead["misses"] == alone["misses"]
    assert lead["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    for found in outcomes:
        assert found["dev"] == pytest.approx(alone["dev"], rel=1e-9)


def test_without_a_spec_one_warning_names_it(caplog):
    with caplog.at_level(logging.WARNING):
        found = train(make_engine(None), Texts())
    plain = train(make_engine(None, caches=False), Texts())
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-12)
    assert sum(found["hits"]) < SIZE
    texts = [r.getMessage() for r in caplog.records if "pt.Ragged" in r.getMessage()]
    assert len([t for t in texts if "padded in another way" in t]) <= 2  # train, dev
    assert texts


def test_tensors_that_are_padded_otherwise_are_not_cached(caplog):
    with caplog.at_level(logging.WARNING):
        found = train(make_engine(Ragged(lengths_of), extra=True), Texts(), epochs=2)
    assert sum(found["hits"]) == 0
    assert "expected tensors of the inputs' padded length" in caplog.text


class Pool(nn.Module):
    """Gives one vector per row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask):
        kept = hidden * mask[..., None]
        return torch.tanh(self.linear(kept.sum(1) / mask.sum(1, keepdim=True)))


class Sliced(nn.Module):
    """Takes one length alone."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, WIDTH, WIDTH) / 4)

    def forward(self, hidden, mask):
        return hidden + self.places, mask


def pad_to_width(samples):
    """Pad to one length, which is as large as the vectors are wide."""
    rows, targets = zip(*samples, strict=True)
    rows = [row[:WIDTH] for row in rows]
    tokens = torch.stack([nn.functional.pad(r, (0, WIDTH - len(r))) for r in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(WIDTH) < lengths[:, None]
    return (tokens, mask), torch.stack([torch.as_tensor(t) for t in targets])


def train_padded_to_width(*layers, boundary, **cache):
    torch.manual_seed(0)
    engine = pt.PipeTransformer(
        nn.Sequential(Embed(), *[make() for make in layers]).double(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([boundary]),
        ragged=Ragged(lengths_of),
        config=config(cache=pt.CacheConfig(**cache)),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(Texts(), 8, collate_fn=pad_to_width):
                engine.step(batch)
    epochs = engine.history.epochs
    return [e.train_loss for e in epochs], [e.cache_hits for e in epochs]


@pytest.mark.parametrize("debug", [False, True])
def test_a_dim_that_is_only_as_large_as_the_padded_one_is_not_cut(debug, caplog):
    layers = (Mix, Pool, lambda: nn.Linear(WIDTH, 2))
    plain, _ = train_padded_to_width(*layers, boundary=3, enabled=False)
    with caplog.at_level(logging.WARNING):
        found, hits = train_padded_to_width(*layers, boundary=3, debug=debug)
    assert found == plain and hits == [0, 0, 0]
    assert "layer 2: ragged: expected tensors of the inputs' length" in caplog.text


@pytest.mark.parametrize("layer", [Mix, Sliced])
def test_rows_that_are_always_padded_to_one_length_are_cached(layer):
    layers = (layer, Head)
    plain, _ = train_padded_to_width(*layers, boundary=2, enabled=False)
    found, hits = train_padded_to_width(*layers, boundary=2)
    assert found == pytest.approx(plain, rel=1e-12) and hits == [0, SIZE, SIZE]


def test_a_wrong_spec_is_an_error_before_the_first_batch():
    engine = make_engine(Ragged(lambda inputs: inputs[1].sum(1) + 1))
    with engine:
        with pytest.raises(ValueError, match=r"Ragged\.lengths: expected \d+ numbers"):
            next(engine.batches(Texts(), 8, collate_fn=pad))
    with pytest.raises(TypeError, match="ragged: expected a Ragged or None, got str"):
        make_engine("text")


def pad_in_front(samples):
    if not isinstance(samples[0], tuple):
        return pad(samples)
    (tokens, mask), targets = pad(samples)
    shifts = (~mask).sum(1)
    rows = zip(tokens, shifts.tolist(), strict=True)
    tokens = torch.stack([row.roll(shift) for row, shift in rows])
    return (tokens, tokens != 0), targets


def losses_with(collate, *, caches):
    engine = make_engine(Ragged(lengths_of), caches=caches, boundaries=(2, 2, 2))
    losses = []
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(Texts(), 6, collate_fn=collate, num_workers=0):
                losses.append(float(engine.step(batch)))
        hits = run_of(engine).history.epochs[-1].cache_hits
    return losses, hits


def test_padding_in_front_is_not_cached(caplog):
    plain, _ = losses_with(pad_in_front, caches=False)
    losses, hits = losses_with(pad_in_front, caches=True)
    assert losses == plain and hits == 0
    assert "ragged: expected the valid positions in front" in caplog.text
    assert "padding_side='right'" in caplog.text
    _, hits = losses_with(pad, caches=True)
    assert hits == SIZE
