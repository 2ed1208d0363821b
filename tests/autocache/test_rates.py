"""Rates as they are measured before a run."""

import time

import torch

from pipetransformer import autocache
from pipetransformer.autocache import ActivationCache, measure_rates


def test_rates_of_the_slab_are_measured_without_the_users_generator():
    before = torch.get_rng_state()
    found = measure_rates(100_000, rows=8, num_samples=64)
    assert torch.equal(before, torch.get_rng_state())
    assert found is not None and found.overlap == 0
    assert found.bytes_per_s > 10**7 and found.record_ns > 0


def test_a_slow_reader_is_measured_as_slow(monkeypatch):
    fetch, limit = ActivationCache.fetch, 10**8  # bytes per second

    def throttled(self, ids, **options):
        found = fetch(self, ids, **options)
        size = sum(t.numel() for records in found for t in records.tensors)
        time.sleep(size / limit)
        return found

    monkeypatch.setattr(ActivationCache, "fetch", throttled)
    found = measure_rates(500_000, rows=4, num_samples=16)
    assert found is not None and found.bytes_per_s <= limit


def test_rates_are_unknown_where_there_is_no_memory(monkeypatch, caplog):
    def refuse(**_):
        raise OSError("no memory")

    monkeypatch.setattr(autocache.ActivationCache, "create", refuse)
    assert measure_rates(1000, rows=4, num_samples=16) is None
    assert "its rates are not known: no memory" in caplog.text
