"""A codec that rounds is used where gradients show no difference, and only there."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import ActivationCache, round_trip
from pipetransformer.explanation import explain_run
from pipetransformer.pipe import Workers
from pipetransformer.replica import codec_gate
from pipetransformer.replica.codec_gate import CodecGate
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report import Clock, CodecRecord
from tests.engine.scenario import config
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import Block

SIZE, TOKENS, WIDTH = 48, 12, 16
LOSSY = ["bf16", "fp16", "int8"]
BOUNDS = {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.02}


class TokenSet(torch.utils.data.Dataset):
    """Sequences of a few numbers in 3 classes."""

    def __init__(self, size=SIZE, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, TOKENS, 4, generator=generator)
        self.y = self.x.mean(1)[:, :3].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(x.mean(1))


class Residue(nn.Module):
    """What is lost by rounding is all that counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        residue = x - (x * 16).round() / 16
        return torch.sin(residue * 1e6) * self.scale


class Watched(nn.Module):
    """Keeps counts, statistics and a hook: what a measurement might touch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.norm(x)).mul_(1.0)


def model(*extra, depth=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [Block(WIDTH) for _ in range(depth)]
        return nn.Sequential(nn.Linear(4, WIDTH), *blocks, *extra, Pool())


def train(
    codec,
    *extra,
    freeze=(3, 3, 3),
    loss=None,
    amp=None,
    slots=1,
    explains=False,
    **cache,
):
    """Train, evaluate; return losses, evaluations, the engine and its explanation."""
    engine = pt.PipeTransformer(
        model(*extra),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        loss=loss or nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(list(freeze)),
        config=config(
            cache=pt.CacheConfig(codec=codec, **cache),
            amp=amp,
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
    )
    losses, found = [], []
    with engine:
        for _ in engine.epochs(len(freeze)):
            for batch in engine.batches(TokenSet(), 12):
                losses.append(float(engine.step(batch)))
            found.append(engine.evaluate(TokenSet(9, seed=5), name="val")["loss"])
        explanation = engine.explain() if explains else None
    return losses, found, engine, explanation


@pytest.fixture
def after_a_batch(monkeypatch):
    """The gate decides on the first twelve samples, so that most are encoded."""
    monkeypatch.setattr(codec_gate, "_SAMPLES", 12)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_codec_that_passes_serves_later_epochs(after_a_batch, codec, slots):
    losses, found, engine, explanation = train(codec, slots=slots, explains=True)
    plain, evaluated, _, _ = train("native", slots=slots)
    (record,) = engine.history.codecs
    assert record.passed and record.cosine >= 0.999
    assert (record.codec, record.boundary, record.samples) == (codec, 3, 12)
    assert 0 < record.output_error < 0.05
    assert [epoch.cache_hits for epoch in engine.history.epochs] == [0, SIZE, SIZE]
    first = SIZE // 12  # batches, whose records are only written
    assert losses[:first] == plain[:first] and losses[first:] != plain[first:]
    assert losses == pytest.approx(plain, rel=1e-2)
    assert found[0] == evaluated[0]  # its set is kept as it is
    line = str(record)
    assert f"codec {codec} at boundary 3: gradient cosine" in line
    assert line.endswith("on 12 samples: in use")
    assert explanation.codecs == (line,) and line in str(explanation)
    assert explanation.to_dict()["codecs"] == [line]


class Turned(nn.Module):
    """Complex on the way, with complex weights."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.phase.exp()).conj().real


@pytest.mark.filterwarnings("error")
def test_gradients_of_complex_weights_are_compared_whole(after_a_batch):
    _, _, engine, _ = train("bf16", Turned())
    (record,) = engine.history.codecs
    assert record.passed and 0.999 <= record.cosine <= 1


def test_encoded_records_take_fewer_bytes_and_a_budget_holds_more(after_a_batch):
    whole = train("native")[2].history.cache[-1]
    small = train("int8")[2].history.cache[-1]
    share = (12 + 36 * 0.45) / 48  # of the payload; scales of 12 tokens count
    assert small["bytes"] < (share + 0.15) * whole["bytes"]
    budget = 4096 + 512 + whole["bytes"] * 2 // 3
    few = train("native", budget_bytes=budget)[2].history.cache[-1]
    more = train("bf16", budget_bytes=budget)[2].history.cache[-1]
    assert few["hits"] < SIZE == more["hits"]


@pytest.mark.parametrize("codec", LOSSY)
def test_a_codec_that_fails_leaves_everything_as_it_is(codec, caplog):
    with caplog.at_level(logging.WARNING):
        losses, found, engine, explanation = train(codec, Residue(), explains=True)
    plain = train("native", Residue())
    assert (losses, found) == plain[:2]
    (record,) = engine.history.codecs
    assert not record.passed and record.cosine < 0.999
    assert "not used, records are kept as they are" in explanation.codecs[0]
    assert explanation.codecs[0] in caplog.text
    assert [epoch.cache_hits for epoch in engine.history.epochs] == [0, SIZE, SIZE]


@pytest.mark.parametrize("amp", [None, "bf16"])
@pytest.mark.parametrize("passes", [True, False])
def test_measuring_changes_nothing_else(monkeypatch, amp, passes):
    monkeypatch.setattr(codec_gate, "_SAMPLES", 36 if passes else 10**9)
    found = []
    for codec in ("native", "bf16"):
        torch.manual_seed(11)
        watched = Watched()
        losses, _, engine, _ = train(
            codec, watched, freeze=(3,), amp=amp, loss=drawing_loss
        )
        state = copy.deepcopy(dict(model_of(engine).state_dict()))
        found.append((losses, state, torch.rand(3).tolist()))
        assert watched.calls == state["5.calls"] > 0
    (losses, state, drawn), (other, others, again) = found
    assert losses == other and drawn == again
    assert all(torch.equal(state[key], others[key]) for key in state)


def drawing_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs + 0 * torch.rand(3), targets)


def test_a_short_pass_is_enough_and_what_it_stored_stays():
    _, _, engine, _ = train("int8")  # fewer samples than the gate asks for
    (record,) = engine.history.codecs
    assert record.passed and (record.samples, record.epoch) == (SIZE, 1)
    assert [epoch.cache_hits for epoch in engine.history.epochs] == [0, SIZE, SIZE]


class NoCopy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale

    def __deepcopy__(self, memo):
        raise RuntimeError("one of a kind")


class FailsInEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        if not self.training and torch.is_grad_enabled():
            raise ZeroDivisionError("no")
        return x * self.scale


class FailsAtLength(nn.Module):
    """Says so in many lines, as errors of compilers do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        if not self.training and torch.is_grad_enabled():
            raise RuntimeError("line\n\x1b[31m" + "x" * 5000)
        return x * self.scale


def test_an_error_of_many_lines_is_told_in_one_and_can_be_explained():
    _, _, engine, explanation = train("bf16", FailsAtLength(), explains=True)
    (record,) = engine.history.codecs
    assert record.reason.startswith("cannot be measured: RuntimeError: line \\x1b[31mx")
    assert len(record.reason) <= 4096 and record.reason.isprintable()
    assert explanation.codecs == (str(record),)
    assert explain_run(json.loads(json.dumps(engine.history.to_json())))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(NoCopy, "RuntimeError: one of a kind"), (FailsInEval, "ZeroDivisionError: no")],
)
def test_what_cannot_be_measured_is_not_encoded(layer, reason):
    losses, found, engine, _ = train("bf16", layer())
    assert (losses, found) == train("native", layer())[:2]
    (record,) = engine.history.codecs
    assert not record.passed and record.cosine is None
    assert record.reason == f"cannot be measured: {reason}"


def test_each_boundary_is_measured_with_what_the_ones_before_left(after_a_batch):
    losses, _, engine, _ = train("int8", freeze=(2, 3, 3, 4, 3))
    plain = train("native", freeze=(2, 3, 3, 4, 3))[0]
    records = engine.history.codecs
    assert [record.boundary for record in records] == [2, 3, 4]
    assert all(record.passed for record in records)
    assert losses == pytest.approx(plain, rel=2e-2)
    hits = [epoch.cache_hits for epoch in engine.history.epochs]
    # Of an unfrozen boundary's records only those that are not above it serve.
    assert hits[:4] == [0, SIZE, SIZE, SIZE]


def test_a_run_starts_with_records_of_its_codec_once_it_has_decided(
    after_a_batch, tmp_path
):
    train("int8", directory=tmp_path)
    _, _, engine, _ = train("int8", directory=tmp_path)
    assert engine.history.epochs[0].cache_hits == SIZE
    losses, _, engine, _ = train("native", directory=tmp_path)
    first = engine.history.cache[0]
    assert first["hits"] < SIZE and first["stale"] == SIZE - first["hits"] > 0
    assert losses == train("native")[0]


def train_ranks(rank, codec):
    codec_gate._SAMPLES = 6
    losses, found, engine, _ = train(codec, freeze=(3, 3))
    run = [record.to_json() for record in engine.history.codecs]
    return losses, found, run


@pytest.mark.distributed
def test_each_rank_decides_for_what_it_stores():
    plain = run_ranks(train_ranks, 2, "native")
    for (losses, found, records), (others, before, _) in zip(
        run_ranks(train_ranks, 2, "int8"), plain, strict=True
    ):
        assert losses == pytest.approx(others, rel=1e-2)
        assert found == pytest.approx(before, rel=1e-2)
        assert [record["passed"] for record in records] == [True]


# --- the prefix ----------------------------------------------------------------


def prefix_of(boundary, workers, ragged=None):
    layers = list(model())[:boundary]
    for layer in layers:
        layer.requires_grad_(False).eval()
    return FrozenPrefix(layers, boundary, workers, Clock(), seed=0, ragged=ragged)


def cache_of(**options):
    return ActivationCache.create(
        run_id="run",
        num_samples=SIZE,
        slot_bytes=4096,
        budget_bytes=1 << 22,
        ragged=True,
        verify="all",
        **options,
    )


AT = DrawPosition(0, 0)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_hit_is_the_recomputation_within_the_codec(codec):
    ids, inputs = torch.arange(SIZE), TokenSet().x
    with Workers(1, intra_op_threads=1) as workers:
        cache = cache_of(audit_every=1)
        prefix = prefix_of(3, workers)
        exact = prefix(lambda: inputs, ids, cache, position=AT, codec=codec)
        read = prefix(lambda: inputs, ids, cache, position=AT, codec=codec)
        assert torch.equal(read, round_trip([exact], codec)[0])
        assert 0 < (read - exact).norm() <= BOUNDS[codec] * exact.norm()
        later = prefix_of(5, workers)
        full = later(lambda: inputs, None, None, position=AT)
        advanced = later(lambda: inputs, ids, cache, position=AT, codec=codec)
        again = later(lambda: inputs, ids, cache, position=AT, codec=codec)
        for values in (advanced, again):
            assert (values - full).norm() <= 4 * BOUNDS[codec] * full.norm()
        # Rounding is no reason for an audit to fail.
        assert cache.counters.audited == 3 and cache.given_up is None
        assert cache.counters.hits == 3 * SIZE
        # Whoever does not want it has none of it.
        assert torch.equal(later(lambda: inputs, ids, cache, position=AT), full)


def test_until_it_is_decided_exact_values_are_returned_and_stored():
    ids, inputs, seen = torch.arange(SIZE), TokenSet().x, []
    with Workers(1, intra_op_threads=1) as workers:
        cache, prefix = cache_of(), prefix_of(3, workers)
        exact = prefix(lambda: inputs, None, None, position=AT)
        prefix(lambda: inputs[:9], ids[:9], cache, position=AT, codec="int8")
        later = prefix_of(4, workers)
        full = later(lambda: inputs, None, None, position=AT)
        for _ in range(2):  # with records of another boundary, and with those it left
            found = later(
                lambda: inputs,
                ids,
                cache,
                position=AT,
                codec="int8",
                compare=lambda *values: seen.append(values),
            )
            assert torch.equal(found, full)
        (first, served), (second, rounded) = seen
        assert torch.equal(first, full) and torch.equal(second, full)
        kept = round_trip([exact[:9]], "int8")[0]
        as_read = prefix_of(4, workers)._layers[3](kept)
        assert torch.equal(served[:9], round_trip([as_read], "int8")[0])
        assert torch.equal(served[9:], round_trip([full[9:]], "int8")[0])
        assert torch.equal(rounded, round_trip([full], "int8")[0])
        (records,) = cache.fetch(ids, chain=later._frozen.fingerprints())
        assert not records.lossy and torch.equal(records.tensors[0], full)


def lengths_in(inputs):
    return (inputs != 0).any(-1).sum(1)


def test_padding_is_measured_and_kept_as_it_is():
    ids, lengths, seen = torch.arange(8), torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), []
    ragged = pt.Ragged(lengths_in, fill=0.5)
    inputs = TokenSet(8).x * (torch.arange(TOKENS) < lengths[:, None])[:, :, None]
    with Workers(1, intra_op_threads=1) as workers:
        cache, prefix = cache_of(), prefix_of(3, workers, ragged)
        exact = prefix(lambda: inputs, None, None, position=AT)
        options = dict(position=AT, codec="int8", compare=lambda *v: seen.append(v))
        assert torch.equal(prefix(lambda: inputs, ids, cache, **options), exact)
        cache.clear()
        options.pop("compare")
        prefix(lambda: inputs, ids, cache, **options)
        read = prefix(lambda: inputs, ids, cache, **options)
    ((_, served),) = seen
    for row, length in enumerate(lengths.tolist()):
        (alone,) = round_trip([exact[row : row + 1, :length]], "int8")
        assert torch.equal(served[row, :length], alone[0])
        assert torch.equal(served[row, length:], exact[row, length:])
        assert torch.equal(read[row, :length], alone[0])
        assert (read[row, length:] == 0.5).all()
    assert torch.equal(served[0], exact[0]) and not torch.equal(served[7], exact[7])


# --- the gate alone ------------------------------------------------------------


def gate_of(*layers, loss=None, weight=None, decided=None):
    told = []
    gate = CodecGate(
        "bf16",
        layers,
        boundary=1,
        loss=loss or nn.MSELoss(),
        loss_weight=weight,
        scaled=lambda loss: loss * 8,
        now=lambda: (0, len(told)),
        tell=told.append,
        decided=decided,
    )
    return gate, told


def test_the_cosine_is_that_of_the_gradients_of_all_batches():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(3, 2), torch.randn(300, 3)
    targets, noise = torch.randn(300, 2), 0.02 * torch.randn(300, 3)
    gate, told = gate_of(layer)
    vectors = [[], []]
    outputs = [[], []]
    for at in range(0, 300, 50):
        part = slice(at, at + 50)
        codec, compare = gate.terms(targets[part])
        if compare is None:
            assert at == 300
            break
        compare(inputs[part], (inputs + noise)[part])
        for k, x in enumerate((inputs, inputs + noise)):
            out = layer(x[part])
            loss = nn.functional.mse_loss(out, targets[part])
            grads = torch.autograd.grad(loss, list(layer.parameters()))
            vectors[k] += [g.flatten() for g in grads]
            outputs[k].append(out.detach())
    (record,) = told
    one, other = (torch.cat(parts) for parts in vectors)
    cosine = nn.functional.cosine_similarity(one, other, dim=0)
    assert record.cosine == pytest.approx(float(cosine), abs=1e-6)
    exact, apart = (torch.cat(parts) for parts in outputs)
    assert record.output_error == pytest.approx(
        float((apart - exact).norm() / exact.norm()), rel=1e-4
    )
    assert record.samples == 300 and layer.weight.grad is None
    assert gate.terms(targets) == ("bf16" if record.passed else "native", None)


def test_batches_that_count_for_nothing_are_not_measured():
    gate, told = gate_of(nn.Linear(3, 2), weight=lambda targets: targets.sum())
    _, compare = gate.terms(torch.zeros(400, 2))
    compare(torch.randn(400, 3), torch.randn(400, 3))
    assert told == [] and gate.terms(None)[1] is not None
    with torch.no_grad():  # nor is there anything to measure without gradients
        assert gate.terms(None) == ("native", None)


class AsManyAsPositive(nn.Module):
    """Gives as many rows as have a positive first value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight)[x[:, 0] > 0]


def test_outputs_that_cannot_be_compared_raise_nothing():
    gate, told = gate_of(AsManyAsPositive(), loss=lambda out, _: out.square().mean())
    inputs = torch.randn(400, 3)
    gate.terms(None)[1](inputs, inputs.abs())
    assert [record.passed for record in told] == [False]
    assert "cannot be measured: RuntimeError" in str(told[0])
    assert gate.terms(None) == ("native", None)


def test_gradients_that_are_not_finite_do_not_pass():
    gate, told = gate_of(nn.Linear(3, 2))
    inputs, targets = torch.randn(400, 3), torch.randn(400, 2)
    _, compare = gate.terms(targets)
    compare(inputs * float("inf"), inputs)  # says nothing
    assert told == []
    compare(inputs, inputs * float("inf"))
    assert [record.passed for record in told] == [False]
    assert gate.terms(targets) == ("native", None)


def test_a_decision_holds_for_later_plans_at_its_boundary():
    decided = CodecRecord(
        epoch=0, step=0, boundary=1, codec="bf16", passed=True, samples=256
    )
    gate, told = gate_of(nn.Linear(3, 2), decided=decided)
    assert gate.terms(None) == ("bf16", None) and told == []


def test_decisions_are_in_the_summary():
    engine = train("bf16", Residue(), freeze=(3, 3))[2]
    summary = json.loads(json.dumps(engine.history.to_json()))
    explained = explain_run(summary)
    assert [str(each) for each in explained.codecs] == [
        str(each) for each in engine.history.codecs
    ]
    assert "Activation cache" in str(explained)
    assert explained.to_dict()["codecs"] == summary["codecs"]


def test_a_codec_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"CacheConfig\.codec: expected 'native', 'bf"):
        pt.CacheConfig(codec="fp8")
