"""Encoded records on the pretended accelerator: as on the host, and no wait missing.

Each run is in processes of its own: the device is registered for good.
"""

import copy
import types

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import ActivationCache, Ragged
from pipetransformer.autocache._ops import decode_rows
from pipetransformer.replica import codec_gate
from tests.engine.scenario import config
from tests.engine.test_codecs import LOSSY, SIZE, TokenSet, model
from tests.support.codec import (
    CASES,
    as_read,
    check_both_ways,
    garbage,
    lengths_of,
    mixed_rows,
    same_bits,
)
from tests.support.device_ranks import MARKS, NODE, pretend
from tests.support.ranks import run_ranks

pytestmark = MARKS

TIMEOUT_S = 110


def check_ops(_rank, libraries):
    fake = pretend(libraries)
    for codec, dtype in CASES:
        for shape in ((9, 12, 40), (9, 3, 4, 40)):
            rows = mixed_rows(dtype, shape)
            for lengths in (None, lengths_of(rows)):
                check_both_ways(rows.to("fake:1"), lengths, codec)
        for seed in range(4):
            encoded, *batch = garbage(codec, dtype, (8, 9), seed)
            expected, valid = decode_rows(encoded, *batch)
            read, whole = decode_rows(encoded.to("fake:1"), *batch)
            assert torch.equal(whole.cpu(), valid)
            assert same_bits(read.cpu()[valid], expected[valid])
    fake.synchronize()
    return fake.violations()


def test_ops_on_an_accelerator_give_the_bits_of_the_host(libraries):
    assert run_ranks(check_ops, 1, libraries, timeout_s=TIMEOUT_S) == [[]]


def check_records(_rank, libraries):
    fake = pretend(libraries)
    device, ids = torch.device("fake", 2), torch.arange(9)
    key = dict(boundary=1, fingerprint=1)
    ragged = Ragged(lambda inputs: None, fill=0.5)
    rows = mixed_rows(torch.float32, (9, 12, 40))
    lengths = lengths_of(rows)
    marks = torch.zeros(9, 12, dtype=torch.int64)
    for codec in LOSSY:
        made = dict(codec=codec, ragged=ragged)
        cache = ActivationCache.create(
            run_id="run",
            num_samples=9,
            slot_bytes=4096,
            budget_bytes=1 << 18,
            ragged=True,
            verify="all",
        )
        tensors = (rows.to(device), marks.to(device))
        assert cache.store(ids, tensors, **key, **made, lengths=lengths) == 9
        (found,) = cache.fetch(ids, chain=[0, 1], length=12, device=device, **made)
        assert {tensor.device for tensor in found.tensors} == {device}
        assert same_bits(found.tensors[0], as_read(rows, lengths, codec))
        (here,) = cache.fetch(ids, chain=[0, 1], length=12, **made)
        assert here.tensors[0].is_cpu and same_bits(here.tensors[0], found.tensors[0])
        cache.store(ids, tensors, **key, ragged=ragged, lengths=lengths)
        (found,) = cache.fetch(ids, chain=[0, 1], length=12, device=device, **made)
        assert found.tensors[0].device == device and not found.lossy
    fake.synchronize()
    return fake.violations()


def test_records_come_and_go_encoded(libraries):
    assert run_ranks(check_records, 1, libraries, timeout_s=TIMEOUT_S) == [[]]


def count_calls():
    """Count what goes through the codec on a device, in this process."""
    calls = []
    ops = torch.ops.pipetransformer
    for name in ("decode_rows", "encode_rows"):
        op = getattr(ops, name)

        def counted(*arguments, op=op, name=name):
            calls.append((name, arguments[0].device.type))
            return op(*arguments)

        setattr(ops, name, counted)
    return calls


def deepcopy(value, memo=None):
    """Copy as the gate does; torch copies no tensor of the pretended accelerator."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.deepcopy(value, memo)


def check_training(_rank, libraries, devices, codec, device_bytes):
    fake, calls = pretend(libraries), count_calls()
    codec_gate.copy = types.SimpleNamespace(deepcopy=deepcopy)
    codec_gate._SAMPLES = 12  # of one batch, so that most records are encoded
    engine = pt.PipeTransformer(
        model(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([3, 3, 3, 4, 4]),
        config=config(
            devices=devices,
            cache=pt.CacheConfig(codec=codec, device_bytes=device_bytes, audit_every=5),
            plan=pt.PlanConfig(num_stages=2, num_microbatches=2),
            pipe=pt.PipeConfig(num_slots=2),
        ),
    )
    losses = []
    with engine:
        for _ in engine.epochs(5):
            for batch in engine.batches(TokenSet(), 12):
                losses.append(float(engine.step(batch)))
            losses.append(engine.evaluate(TokenSet(9, seed=5), name="val")["loss"])
    fake.synchronize()
    history = engine.history
    hits = [(epoch.cache_hits, epoch.cache_misses) for epoch in history.epochs]
    assert [record.passed for record in history.codecs] == [True, True]
    assert history.cache[-1]["audited"] > 0 and not history.cache[-1]["corrupt"]
    return losses, hits, set(calls), fake.violations()


@pytest.mark.parametrize(
    ("codec", "device_bytes"),
    [*((codec, None) for codec in LOSSY), ("int8", 1 << 16)],
)
def test_training_is_that_of_the_host(libraries, codec, device_bytes):
    ((there, hits, calls, found),) = run_ranks(
        check_training, 1, libraries, NODE[:2], codec, device_bytes, timeout_s=TIMEOUT_S
    )
    ((here, hits_here, calls_here, _),) = run_ranks(
        check_training, 1, libraries, ("cpu",) * 2, codec, None, timeout_s=TIMEOUT_S
    )
    assert found == [] and hits == hits_here
    assert hits[1] == (SIZE, 0)
    assert there == pytest.approx(here, rel=1e-5)
    assert calls == {("decode_rows", "fake"), ("encode_rows", "fake")}
    assert calls_here == set()
