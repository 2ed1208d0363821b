"""Whatever the cache serves is what computing it again gives, to the bit or the bound.

All combinations of boundary, form, dtype, rows and storage (`autocache.cases`), through
the frozen prefix, with audits of every hit.
"""

import math

import pytest
import torch

import tests.benchmarks  # noqa: F401 - the cases are shared with a benchmark
from autocache import cases
from autocache.cases import CASES, LAYERS, SAMPLES, Case, Subject


def check(case, measured, *, same_shape):
    bound = case.bound(same_shape=same_shape)
    assert measured.difference <= bound
    if bound == 0:
        assert measured.same_bits


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hit_equals_recomputation(case):
    subject = Subject(case)
    same = cases.hits_of_the_same_batches(subject)
    check(case, same, same_shape=True)
    other = cases.hits_of_other_batches(subject)
    check(case, other, same_shape=False)
    assert (same.hits, other.hits) == (SAMPLES, SAMPLES)
    storage = cases.STORAGES[case.storage]
    assert (same.disk_hits > 0) == storage.on_disk
    assert (0 < same.device_hits < SAMPLES) == storage.on_device
    assert (0 < other.device_hits < SAMPLES) == storage.on_device


@pytest.mark.parametrize("case", [c for c in CASES if c.boundary > 1], ids=str)
def test_a_record_that_advances_equals_recomputation(case):
    for below in range(1, case.boundary):
        subject = Subject(case)
        whole = cases.advanced(subject, below)
        check(case, whole, same_shape=True)
        mixed = cases.partly_advanced(subject, below)
        check(case, mixed, same_shape=False)
        assert (whole.hits, mixed.hits) == (SAMPLES, 2 * cases.BATCH)


@pytest.mark.parametrize("case", [c for c in CASES if c.boundary < LAYERS], ids=str)
def test_after_an_unfreeze_hits_equal_recomputation(case):
    for above in range(case.boundary + 1, LAYERS + 1):
        found = cases.unfrozen(Subject(case), above)
        check(case, found, same_shape=True)
        assert found.stale == cases.BATCH
        assert found.hits == SAMPLES - cases.BATCH


def test_cases_of_host_memory_have_all_dtypes_and_others_two():
    others = 2 * (len(cases.STORAGES) - 1)  # of two dtypes
    assert len(CASES) == len(set(CASES)) == LAYERS * 2 * 2 * (4 + others)


def test_another_value_is_a_difference():
    fresh = torch.tensor([1.0, -4.0, math.inf])
    for wrong, apart in (
        (fresh.clone(), 0.0),
        (torch.tensor([1.0, -4.5, math.inf]), 0.125),
        (torch.tensor([1.0, -4.0, -math.inf]), math.inf),
        (torch.tensor([math.nan, -4.0, math.inf]), math.inf),
        (torch.tensor([1.0, -4.0]), math.inf),
        (fresh.double(), math.inf),
    ):
        assert cases.difference(wrong, fresh) == apart
        assert cases.same_bits(wrong, fresh) == (apart == 0)
    assert not cases.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_a_cache_that_serves_something_else_is_found(monkeypatch):
    fetch = cases.ActivationCache.fetch

    def other(self, *arguments, **options):
        found = fetch(self, *arguments, **options)
        for group in found:
            group.tensors[0][-1] *= 1.001  # not the row that is audited
        return found

    monkeypatch.setattr(cases.ActivationCache, "fetch", other)
    measured = cases.hits_of_the_same_batches(Subject(Case(2)))
    assert not measured.same_bits and 0 < measured.difference < 0.01
