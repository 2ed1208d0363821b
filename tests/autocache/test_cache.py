"""What one process may rely on: hits equal recomputation, doubts are misses."""

import json
import logging
import os

import pytest
import torch
from torch import nn

from pipetransformer.autocache import (
    ActivationCache,
    CacheCounters,
    fingerprint_chain,
    hash_rows,
    record_bytes,
    slots_within,
)

SAMPLES = 40


def make_cache(*, slot_bytes=4096, num_samples=SAMPLES, num_slots=None, **options):
    slots = num_samples if num_slots is None else num_slots
    budget = 4096 + 64 * (num_samples // 8 + 1) + slots * slot_bytes
    return ActivationCache.create(
        run_id=options.pop("run_id", "run"),
        num_samples=num_samples,
        slot_bytes=slot_bytes,
        budget_bytes=budget,
        **options,
    )


def merged(groups, rows):
    """{position: (boundary, row of each tensor)} of a fetch."""
    found = {}
    for group in groups:
        assert group.rows.dtype == torch.int64
        for k, row in enumerate(group.rows.tolist()):
            assert row not in found and 0 <= row < rows
            found[row] = (group.boundary, tuple(t[k] for t in group.tensors))
    return found


def values(ids, boundary, width=8):
    return (ids[:, None] * 100 + boundary + torch.arange(width) / 8).float()


def test_hit_equals_recomputation_bitwise_at_every_boundary():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()).eval() for _ in range(4)]
    chain = fingerprint_chain(layers, 4)
    inputs = torch.randn(SAMPLES, 16)
    cache = make_cache(verify="all")
    for boundary in range(1, 5):
        x = inputs
        with torch.no_grad():
            for layer in layers[:boundary]:
                x = layer(x)
        ids = torch.randperm(SAMPLES)
        stored = cache.store(
            ids, (x[ids],), boundary=boundary, fingerprint=chain[boundary]
        )
        assert stored == SAMPLES
        ids = torch.randperm(SAMPLES)
        (group,) = cache.fetch(ids, chain=chain[: boundary + 1])
        assert group.boundary == boundary
        assert torch.equal(group.tensors[0], x[ids[group.rows]])
    assert cache.counters.misses == 0


def test_advance_leaves_a_mix_of_boundaries_that_are_all_valid():
    cache, chain = make_cache(), [10, 11, 12, 13]
    ids = torch.arange(SAMPLES)
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=11)
    cache.store(ids[:20], (values(ids[:20], 2),), boundary=2, fingerprint=12)
    cache.store(ids[:10], (values(ids[:10], 3),), boundary=3, fingerprint=13)
    groups = cache.fetch(ids, chain=chain)
    assert [g.boundary for g in groups] == [1, 2, 3]
    assert [len(g.rows) for g in groups] == [20, 10, 10]
    for group in groups:
        assert torch.equal(group.tensors[0], values(ids[group.rows], group.boundary))
    assert cache.counters == CacheCounters(
        hits=40, misses=0, stale=0, changed=0, corrupt=0, stored=70, skipped=0, full=0
    )


def test_unfreeze_keeps_lower_records_and_misses_higher_ones():
    cache = make_cache()
    ids = torch.arange(20)
    cache.store(ids, (values(ids, 2),), boundary=2, fingerprint=12)
    cache.store(ids[:10], (values(ids[:10], 3),), boundary=3, fingerprint=13)
    found = merged(cache.fetch(ids, chain=[10, 11, 12]), 20)
    assert sorted(found) == list(range(10, 20))
    assert cache.counters.stale == 10
    # The lower boundary takes the slots over, one generation later.
    stored = cache.store(ids, (values(ids, 2),), boundary=2, fingerprint=12)
    assert stored == 10
    assert len(merged(cache.fetch(ids, chain=[10, 11, 12]), 20)) == 20


def test_changed_fingerprint_is_a_stale_miss():
    cache, ids = make_cache(), torch.arange(3)
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=11)
    assert cache.fetch(ids, chain=[10, 99]) == []
    assert (cache.counters.misses, cache.counters.stale) == (3, 3)


def test_input_hash_decides_when_given():
    cache, ids = make_cache(), torch.arange(4)
    hashes = torch.tensor([5, -6, 7, -(2**63)])
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1, input_hashes=hashes)
    changed = torch.tensor([5, 6, 7, -(2**63)])
    chain = [0, 1]
    found = merged(cache.fetch(ids, chain=chain, input_hashes=changed), 4)
    assert sorted(found) == [0, 2, 3]
    assert len(merged(cache.fetch(ids, chain=chain), 4)) == 4
    other = torch.arange(10, 12)
    cache.store(other, (values(other, 1),), boundary=1, fingerprint=1)
    assert cache.fetch(other, chain=chain, input_hashes=hashes[:2]) == []


def test_equal_key_is_skipped():
    cache, ids = make_cache(), torch.arange(4)
    first = values(ids, 1)
    hashes = hash_rows(ids[:, None])
    arguments = dict(boundary=1, fingerprint=1, input_hashes=hashes)
    assert cache.store(ids, (first,), **arguments) == 4
    assert cache.store(ids, (first + 1,), **arguments) == 0
    assert cache.counters.skipped == 4
    (group,) = cache.fetch(ids, chain=[0, 1])
    assert torch.equal(group.tensors[0], first)


def test_duplicate_ids_are_legal():
    cache, ids = make_cache(), torch.tensor([3, 5, 3, 3])
    assert cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1) == 2
    (group,) = cache.fetch(ids.flip(0), chain=[0, 1])
    assert torch.equal(group.tensors[0], values(ids.flip(0), 1))
    assert cache.counters.hits == 4


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    + [torch.bool, torch.uint8, torch.int64, torch.complex64],
)
def test_every_dtype_and_odd_row_size_survives(dtype):
    cache, ids = make_cache(), torch.arange(6)
    tensor = torch.randint(0, 2, (6, 3, 1)).to(dtype)
    cache.store(ids, (tensor,), boundary=1, fingerprint=1)
    (group,) = cache.fetch(ids, chain=[0, 1])
    assert group.tensors[0].dtype == dtype
    assert torch.equal(group.tensors[0], tensor)


def test_tuple_of_tensors_survives_non_contiguous_and_with_gradients():
    cache, ids = make_cache(), torch.arange(5)
    hidden = torch.randn(5, 4, 7, requires_grad=True).transpose(1, 2)
    mask = torch.rand(10, 4)[::2] > 0.5
    scalars = torch.arange(5, dtype=torch.int32)
    cache.store(ids, (hidden, mask, scalars), boundary=2, fingerprint=1)
    (group,) = cache.fetch(ids[[4, 1]], chain=[0, 0, 1])
    for got, expected in zip(group.tensors, (hidden, mask, scalars), strict=True):
        assert torch.equal(got, expected[[4, 1]])
        assert not got.requires_grad


def test_records_of_different_shapes_come_in_groups_of_their_own():
    cache = make_cache()
    for row, length in enumerate([3, 5, 3]):
        x = torch.full((1, length), float(row))
        cache.store(torch.tensor([row]), (x,), boundary=1, fingerprint=1)
    groups = cache.fetch(torch.arange(3), chain=[0, 1])
    assert [g.rows.tolist() for g in groups] == [[0, 2], [1]]
    assert [g.tensors[0].shape for g in groups] == [(2, 3), (1, 5)]


def test_zero_rows_are_legal():
    cache, none = make_cache(), torch.empty(0, dtype=torch.int64)
    assert cache.store(none, (torch.zeros(0, 8),), boundary=1, fingerprint=1) == 0
    assert cache.fetch(none, chain=[0, 1]) == []
    assert hash_rows(torch.zeros(0, 3)).shape == (0,)


def test_budget_smaller_than_the_set_serves_who_came_first(caplog):
    cache, ids = make_cache(num_slots=15), torch.randperm(SAMPLES)
    assert cache.num_slots == 15
    for _ in range(3):
        cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
        found = merged(cache.fetch(ids, chain=[0, 1]), SAMPLES)
        assert sorted(found) == list(range(15))
    # An advance finds its own slot again.
    assert cache.store(ids, (values(ids, 2),), boundary=2, fingerprint=2) == 15
    assert cache.counters.full == 4 * 25
    assert [r.message for r in caplog.records] == [
        "cache: 25 records have no slot and will be recomputed; see counters for more"
    ]


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.zeros(2, 5000),),
        tuple(torch.zeros(2, 1) for _ in range(7)),
        (torch.zeros(2, 1, 1, 1, 1, 1, 1, 1),),
        (torch.zeros(2, 3).to_sparse(),),
        (torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8),),
    ],
)
def test_records_that_do_not_fit_are_refused_without_an_error(tensors):
    cache = make_cache()
    ids = torch.arange(2)
    assert cache.store(ids, tensors, boundary=1, fingerprint=1) == 0
    assert cache.counters.full == 2
    assert cache.fetch(ids, chain=[0, 1]) == []


def test_record_bytes_is_exactly_what_a_record_needs():
    tensors = (torch.zeros(1, 100), torch.zeros(1, 3, dtype=torch.bool))
    needed = record_bytes(tensors)
    assert needed % 8 == 0
    # Slots are rounded up to 64 bytes, so one that is too small is 64 bytes less.
    for slot_bytes, stored in ((needed, 1), (needed - 64, 0)):
        cache = make_cache(slot_bytes=slot_bytes)
        rows = cache.store(torch.tensor([0]), tensors, boundary=1, fingerprint=1)
        assert rows == stored


def flip_bit(cache, pattern, offset=0):
    """Flip one bit of the first place in the slab that holds `pattern`."""
    with open(f"/proc/self/fd/{json.loads(cache.address)['fd']}", "r+b") as file:
        position = file.read().index(pattern) + offset
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def test_flipped_payload_bit_is_a_counted_miss_and_is_replaced(caplog):
    cache, ids = make_cache(verify="all"), torch.arange(5)
    x = torch.randn(5, 64)
    cache.store(ids, (x,), boundary=1, fingerprint=1)
    flip_bit(cache, x[3].numpy().tobytes(), offset=77)
    for _ in range(2):
        found = merged(cache.fetch(ids, chain=[0, 1]), 5)
        assert sorted(found) == [0, 1, 2, 4]
        assert all(torch.equal(found[row][1][0], x[row]) for row in found)
    assert (cache.counters.corrupt, cache.counters.misses) == (1, 2)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "failed their checksum" in caplog.text
    assert cache.store(ids, (x,), boundary=1, fingerprint=1) == 1
    (group,) = cache.fetch(ids, chain=[0, 1])
    assert torch.equal(group.tensors[0], x)


def test_flipped_header_bit_is_a_miss_without_verifying_all():
    cache, ids = make_cache(), torch.arange(2)
    fingerprint = 0x1234567890ABCDEF
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=fingerprint)
    flip_bit(cache, fingerprint.to_bytes(8, "little"))
    assert sorted(merged(cache.fetch(ids, chain=[0, fingerprint]), 2)) == [1]
    assert cache.counters.corrupt == 1


def test_sampled_verification_finds_corruption_within_64_reads():
    cache, ids = make_cache(), torch.zeros(64, dtype=torch.int64)
    x = torch.randn(1, 64)
    cache.store(ids[:1], (x,), boundary=1, fingerprint=1)
    flip_bit(cache, x.numpy().tobytes())
    cache.fetch(ids, chain=[0, 1])
    assert cache.counters.corrupt == 1


def test_nothing_leaks_over_200_caches():
    def usage():
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[0])
        return len(os.listdir("/proc/self/fd")), pages * 4096

    def use():
        cache = make_cache(slot_bytes=1 << 16)
        other = ActivationCache.attach(cache.address, run_id="run")
        ids = torch.arange(SAMPLES)
        cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
        assert len(merged(other.fetch(ids, chain=[0, 1]), SAMPLES)) == SAMPLES
        cache.close()

    use()
    files, size = usage()
    for _ in range(200):
        use()
    after_files, after_size = usage()
    assert after_files == files
    assert after_size - size < 8 * SAMPLES * (1 << 16)


@pytest.mark.parametrize("slot_bytes", [241, 256, 500, 4097])
@pytest.mark.parametrize("num_samples", [1, 7, 8, 9, 300])
def test_slots_within_a_budget_are_those_that_creation_reserves(
    slot_bytes, num_samples
):
    for budget in (100, 4600, 4735, 5000, 20_000, 10**7):
        wanted = slots_within(budget, num_samples=num_samples, slot_bytes=slot_bytes)
        options = {"num_samples": num_samples, "slot_bytes": slot_bytes}
        if wanted == 0:
            with pytest.raises(ValueError, match="budget_bytes: expected at least"):
                ActivationCache.create(run_id="r", budget_bytes=budget, **options)
            continue
        cache = ActivationCache.create(run_id="r", budget_bytes=budget, **options)
        assert cache.num_slots == wanted
        cache.close()
