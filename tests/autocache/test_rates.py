"""Rates as they are measured before a run."""

import time

import pytest
import torch

from pipetransformer import autocache
from pipetransformer.autocache import (
    ActivationCache,
    measure_device_rates,
    measure_disk_rates,
    measure_rates,
)

HERE = torch.device("cpu")


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


def test_rates_of_copies_are_measured_without_the_users_generator():
    before = torch.get_rng_state()
    found = measure_device_rates(100_000, HERE, rows=8, num_samples=64)
    assert torch.equal(before, torch.get_rng_state())
    assert found is not None and found.bytes_per_s > 10**7 and found.record_ns > 0


def test_without_memory_for_copies_there_are_no_rates(monkeypatch, caplog):
    monkeypatch.setattr(autocache.rates.DeviceTier, "find", lambda *_: None)
    assert measure_device_rates(1000, HERE, rows=8, num_samples=64) is None
    assert "rates of cpu are not known" in caplog.text


@pytest.mark.parametrize("size", [10, 20_000, 10**6])
def test_rates_of_the_disk_are_those_of_what_was_moved(tmp_path, monkeypatch, size):
    seen = []
    close = ActivationCache.close

    def look(self):
        if self.has_disk:
            seen.append((self.disk_traffic, self.disk_used_bytes, self.counters))
        close(self)

    monkeypatch.setattr(ActivationCache, "close", look)
    before = torch.get_rng_state()
    found = measure_disk_rates(size, tmp_path, num_samples=100)
    assert torch.equal(before, torch.get_rng_state())
    ((moved, used, counts),) = seen
    assert counts.full == 0 and moved.written_bytes == used >= min(100 * size, 10**6)
    assert 0 < moved.read_bytes <= used
    assert found.bytes_per_s == round(moved.read_bytes * 1e9 / moved.read_ns)
    assert found.write_bytes_per_s == round(moved.written_bytes * 1e9 / moved.write_ns)
    assert found.overlap == 1 and list(tmp_path.iterdir()) == []


def test_a_disk_that_is_not_there_has_no_rates(tmp_path, caplog):
    assert measure_disk_rates(1000, tmp_path / "none", num_samples=10) is None
    assert "the rates of its disk are not known, it is not used: " in caplog.text


def test_rates_are_unknown_where_there_is_no_memory(monkeypatch, caplog):
    def refuse(**_):
        raise OSError("no memory")

    monkeypatch.setattr(autocache.ActivationCache, "create", refuse)
    assert measure_rates(1000, rows=4, num_samples=16) is None
    assert "its rates are not known: no memory" in caplog.text
