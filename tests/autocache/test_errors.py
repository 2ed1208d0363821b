"""Mistakes of a caller: each has an error that shows expected and actual."""

import errno
import json
import os
import resource

import pytest
import torch

from pipetransformer._extension import host_memory
from pipetransformer.autocache import (
    ActivationCache,
    fingerprint_chain,
    hash_rows,
    record_bytes,
)

from .test_cache import make_cache


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(num_samples=0), "num_samples: expected a number >= 1, got 0"),
        (dict(budget_bytes=-5), "budget_bytes: expected a number >= 1, got -5"),
        (dict(budget_bytes=5000), r"budget_bytes: expected at least \d+ .* got 5000"),
        (dict(slot_bytes=8), r"slot_bytes: expected more than the \d+ .* got 8"),
        (dict(run_id=""), "run_id: expected 1 to 255 bytes, got 0 bytes"),
        (dict(run_id="x" * 256), "run_id: expected 1 to 255 bytes, got 256 bytes"),
        (dict(verify="most"), "verify: expected 'sampled' or 'all', got 'most'"),
    ],
)
def test_create_names_the_argument(arguments, text):
    valid = dict(run_id="r", num_samples=9, slot_bytes=4096, budget_bytes=1 << 20)
    with pytest.raises(ValueError, match=text):
        ActivationCache.create(**{**valid, **arguments})


@pytest.fixture
def no_large_files():
    """The kernel refuses what would otherwise be reserved until it ends processes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_cache_beyond_what_is_available_is_refused_before_it_is_reserved(
    no_large_files,
):
    available = host_memory().available_bytes
    text = r"reserve \d+ bytes of shared memory with \d+ available"
    with pytest.raises(OSError, match=text) as refusal:
        ActivationCache.create(
            run_id="r",
            num_samples=2 * available >> 30,
            slot_bytes=1 << 30,
            budget_bytes=3 * available,
        )
    assert refusal.value.errno == errno.ENOMEM


def test_foreign_run_is_refused():
    cache = make_cache(run_id="mine")
    with pytest.raises(ValueError, match="run_id: expected 'yours', got 'mine'"):
        ActivationCache.attach(cache.address, run_id="yours")


def test_address_of_something_else_is_refused(tmp_path):
    cache = make_cache()
    address = json.loads(cache.address)
    cache.close()
    with pytest.raises(ValueError, match="address: expected .* got .*No such file"):
        ActivationCache.attach(json.dumps(address).encode(), run_id="run")
    with open(tmp_path / "file", "w+") as file:
        other = {"pid": os.getpid(), "fd": file.fileno()}
        with pytest.raises(ValueError, match="expected sealed shared memory"):
            ActivationCache.attach(json.dumps(other).encode(), run_id="run")


def test_memory_of_another_format_is_refused():
    cache = make_cache()
    with open(f"/proc/self/fd/{json.loads(cache.address)['fd']}", "r+b") as file:
        file.seek(8)
        file.write(b"\x63")
    with pytest.raises(ValueError, match="address: expected a cache of format 4"):
        ActivationCache.attach(cache.address, run_id="run")


@pytest.mark.parametrize("bad", [-1, 40])
def test_ids_out_of_range_are_named(bad):
    cache, ids = make_cache(), torch.tensor([0, bad])
    text = rf"ids: expected sample ids in 0\.\.39, got {bad}"
    with pytest.raises(ValueError, match=text):
        cache.fetch(ids, chain=[0])
    with pytest.raises(ValueError, match=text):
        cache.store(ids, (torch.zeros(2, 1),), boundary=1, fingerprint=1)


def test_shapes_and_dtypes_are_named():
    cache, ids = make_cache(), torch.arange(2)
    rows = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"ids: expected an int64 .*got Int of shape"):
        cache.fetch(ids.int(), chain=[0])
    with pytest.raises(ValueError, match=r"input_hashes: .* shape \(2,\), got Long"):
        cache.fetch(ids, chain=[0], input_hashes=torch.arange(3))
    with pytest.raises(ValueError, match=r"ids: .* one per row .* \(3\), got 2"):
        cache.store(ids, (torch.zeros(3, 1),), boundary=1, fingerprint=1)
    with pytest.raises(ValueError, match="tensors: expected equal first dims"):
        cache.store(ids, (rows, torch.zeros(3)), boundary=1, fingerprint=1)
    with pytest.raises(ValueError, match="tensors: expected at least one, got none"):
        cache.store(ids, (), boundary=1, fingerprint=1)
    with pytest.raises(ValueError, match="boundary: expected a number >= 0, got -1"):
        cache.store(ids, (rows,), boundary=-1, fingerprint=1)


def test_hashes_and_sizes_name_their_arguments():
    with pytest.raises(ValueError, match="tensors: expected at least one, got none"):
        hash_rows()
    with pytest.raises(ValueError, match="tensors: expected equal first dims"):
        hash_rows(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="tensors: expected at least one row"):
        record_bytes([torch.zeros(0, 2)])
    with pytest.raises(ValueError, match=r"count: expected a number in 0\.\.0 .*got 1"):
        fingerprint_chain([], 1)


def test_closed_cache_keeps_its_counters_only():
    cache = make_cache()
    cache.fetch(torch.arange(3), chain=[0])
    cache.close()
    cache.close()
    assert cache.counters.misses == 3
    with pytest.raises(ValueError, match="cache: expected an open one, got a closed"):
        cache.fetch(torch.arange(3), chain=[0])
    with pytest.raises(ValueError, match="cache: expected an open one"):
        _ = cache.address
