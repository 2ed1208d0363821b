"""Copies on a device are what was read, of the version asked for, and bounded.

The device is the host's here; the engine's own tests have another one.
"""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.autocache import ActivationCache, Ragged, record_bytes
from pipetransformer.autocache.device_tier import DeviceTier, Version
from pipetransformer.autocache.records import Records, joined

HERE = torch.device("cpu")
RECORDS, WIDTH, PADDED = 12, 3, 5
RAGGED = Ragged(lambda inputs: inputs, dim=(2, None), fill=(-7.0, 0.0))
NATIVE = Version(1, "native")


def values_of(ids, lengths, padded):
    """Return a ragged tensor (rows, WIDTH, padded) and one of fixed shape."""
    steps = torch.arange(padded)
    text = 100.0 * ids[:, None, None] + 10.0 * torch.arange(WIDTH)[:, None] + steps
    text = torch.where(steps < lengths[:, None, None], text, -7.0)
    return text, torch.stack([ids, -ids], 1)


LENGTHS = torch.arange(RECORDS) % (PADDED + 1)


@st.composite
def batches(draw):
    ids = draw(st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=8))
    return torch.tensor(ids), draw(st.integers(PADDED, PADDED + 3))


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(batches(), min_size=1, max_size=8),
    budget=st.integers(1, 2000),
    ragged=st.booleans(),
    expected=st.integers(1, RECORDS),
)
def test_copies_are_what_was_read_within_the_budget(asked, budget, ragged, expected):
    tier = DeviceTier(HERE, budget, RECORDS, expected)
    spec, held, hashes = RAGGED if ragged else None, {}, 10 * torch.arange(RECORDS)
    for ids, padded in asked:
        padded = padded if ragged else PADDED
        lengths = LENGTHS[ids] if ragged else torch.full_like(ids, PADDED)
        tensors = values_of(ids, lengths, padded)
        found = tier.find(NATIVE, 4, ids, hashes[ids], spec, padded)
        rows = [] if found is None else found.rows.tolist()
        assert rows == [n for n, i in enumerate(ids.tolist()) if i in held]
        if found is not None:
            for copied, whole in zip(found.tensors, tensors, strict=True):
                assert torch.equal(copied, whole[found.rows])
            assert found.boundary == 4 and not found.lossy
            assert (found.lengths is not None) == ragged
        everything = torch.arange(len(ids))
        read = Records(4, everything, tensors, lengths if ragged else None)
        kept = tier.keep(ids, hashes[ids], read, spec)
        assert all(map(torch.equal, kept.tensors, tensors))
        there = tier.holds(torch.arange(RECORDS)).nonzero().flatten().tolist()
        assert set(held) <= set(there) <= {*held, *ids.tolist()}
        held = set(there)
        assert tier.bytes <= budget


@pytest.mark.parametrize("expected", [1, 4, 11, RECORDS])
def test_all_is_copied_where_there_is_room(expected):
    tier, ids = DeviceTier(HERE, 10**6, RECORDS, expected), torch.arange(RECORDS)
    hashes = torch.zeros(RECORDS, dtype=torch.int64)
    for part in ids.split(5):
        assert tier.find(NATIVE, 1, part, hashes[part], None, None) is None
        read = Records(1, torch.arange(len(part)), (part.double()[:, None],))
        tier.keep(part, hashes[part], read, None)
    found = tier.find(NATIVE, 1, ids.flip(0), hashes, None, None)
    assert torch.equal(found.tensors[0][:, 0], ids.flip(0).double())
    assert found.rows.tolist() == list(range(RECORDS))
    assert expected < RECORDS or tier.bytes == 8 * (RECORDS + 1)


def filled(lossy=False):
    tier, ids = DeviceTier(HERE, 10**6, RECORDS, RECORDS), torch.arange(4)
    tier.find(NATIVE, 1, ids, ids, None, None)
    read = Records(1, torch.arange(4), (torch.zeros(4, 2),), lossy=lossy)
    tier.keep(ids, ids, read, None)
    return tier, ids


@pytest.mark.parametrize("version", [Version(2, "native"), Version(1, "int8")])
def test_another_version_drops_all_copies(version):
    tier, ids = filled()
    assert tier.find(NATIVE, 1, ids, ids, None, None) is not None
    assert tier.find(version, 1, ids, ids, None, None) is None
    assert tier.bytes == 0
    assert tier.find(NATIVE, 1, ids, ids, None, None) is None


def test_copies_of_other_inputs_are_not_found():
    tier, ids = filled()
    hashes = torch.tensor([0, 9, 2, 9])
    found = tier.find(NATIVE, 1, ids, hashes, None, None)
    assert found.rows.tolist() == [0, 2]


class CopiedRows(TorchDispatchMode):
    """Counts the rows that are copied into others."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index_copy_.default:
            self.count += len(args[3])
        return function(*args, **kwargs or {})


def test_many_parts_are_joined_with_one_copy_of_each_row():
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    parts = [
        Records(2, rows, (rows.double()[:, None],), 10 * rows, lossy=number == 1)
        for number, rows in enumerate(part.sort()[0] for part in ids.split(3))
    ]
    below = Records(1, torch.tensor([20]), (torch.zeros(1, 1),))
    with CopiedRows() as copied:
        whole, other = joined([parts[0], below, *parts[1:]])
    assert other is below
    assert whole.rows.tolist() == whole.tensors[0][:, 0].tolist() == [*range(20)]
    assert whole.lengths.tolist() == [10 * n for n in range(20)]
    assert whole.lossy and whole.boundary == 2
    assert copied.count == 20


def test_copies_tell_that_they_were_rounded():
    tier, ids = filled(lossy=True)
    assert tier.find(NATIVE, 1, ids, ids, None, None).lossy


def test_without_memory_there_are_no_copies_and_one_warning(monkeypatch, caplog):
    def refuse(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.Tensor, "new_empty", refuse)
    with caplog.at_level(logging.WARNING):
        tier, ids = filled()
        read = Records(1, torch.arange(4), (torch.ones(4, 2),))
        kept = tier.keep(ids, ids, read, None)
    assert torch.equal(kept.tensors[0], torch.ones(4, 2))
    assert len(caplog.records) == 1 and "no copies of records" in caplog.text
    assert tier.bytes == 0 and not tier.holds(ids).any()


def asked_and_kept(tier, lengths, tensors, ids, spec=RAGGED):
    """Read records of these lengths through the tier; return what copies there were."""
    hashes, padded = torch.zeros(RECORDS, dtype=torch.int64), int(lengths.max())
    found = tier.find(NATIVE, 4, ids, hashes[ids], spec, padded)
    records = Records(4, torch.arange(len(ids)), tuple(tensors), lengths)
    tier.keep(ids, hashes[ids], records, spec)
    return found


@pytest.mark.parametrize("first", [[1, 1, 1], [0, 0, 0], [0, 0, 1]], ids=str)
def test_longer_rows_than_the_first_are_copied_while_the_budget_lasts(first):
    later = [[5, 9, 2], [30, 30, 30], [4, 0, 50]]
    lengths = torch.tensor([first, *later])
    parts = torch.arange(RECORDS).view(4, 3)
    for budget in (20_000, 2000, 1000):
        tier = DeviceTier(HERE, budget, RECORDS, RECORDS)
        for which in (0, 1, 2, 3):
            values = values_of(parts[which], lengths[which], int(lengths[which].max()))
            asked_and_kept(tier, lengths[which], values, parts[which])
            assert tier.bytes <= budget
        there = tier.holds(torch.arange(RECORDS))
        assert there.all() if budget == 20_000 else there.any() and not there.all()
        ids = torch.randperm(RECORDS)
        taken = lengths.flatten()[ids]
        whole = values_of(ids, taken, 50)
        found = asked_and_kept(tier, taken, whole, ids)
        assert found.rows.tolist() == there[ids].nonzero().flatten().tolist()
        assert torch.equal(found.lengths, taken[found.rows])
        for copied, tensor in zip(found.tensors, whole, strict=True):
            assert torch.equal(copied, tensor[found.rows])


def test_without_memory_for_longer_rows_the_copies_stay(monkeypatch, caplog):
    tier = DeviceTier(HERE, 10**6, RECORDS, RECORDS)
    short, long = torch.tensor([1, 1]), torch.tensor([90, 90])
    ids, others = torch.arange(2), torch.arange(2, 4)
    asked_and_kept(tier, short, values_of(ids, short, 1), ids)

    def refuse(*_):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", refuse)
        asked_and_kept(tier, long, values_of(others, long, 90), others)
    assert "no more copies of records" in caplog.text
    assert tier.holds(torch.arange(4)).tolist() == [True, True, False, False]
    assert asked_and_kept(tier, short, values_of(ids, short, 1), ids) is not None


@pytest.mark.parametrize("lengths", [[3, 1], [0, 0]], ids=str)
def test_positions_without_values_are_found_with_their_length(lengths):
    lengths, ids = torch.tensor(lengths), torch.arange(2)
    spec = Ragged(lambda inputs: inputs, dim=(2, None))
    tier = DeviceTier(HERE, 10**6, RECORDS, RECORDS)
    tensors = torch.zeros(2, 0, int(lengths.max())), ids.double()
    for _ in range(2):
        found = asked_and_kept(tier, lengths, tensors, ids, spec)
    assert [each.shape for each in found.tensors] == [each.shape for each in tensors]
    assert torch.equal(found.lengths, lengths)


def cache_of(budget, tmp_path=None, samples=8):
    values = torch.arange(samples * 600.0).view(samples, 600)
    size = record_bytes([values[:1]])
    on_disk = tmp_path is not None
    cache = ActivationCache.create(
        run_id="copies",
        num_samples=samples,
        slot_bytes=size,
        budget_bytes=4096 + (2 if on_disk else 2 * samples) * (size + 64),
    )
    if on_disk:
        cache.add_disk(tmp_path)
    ids = torch.arange(samples)
    cache.store(ids, (values,), boundary=1, fingerprint=5, input_hashes=ids)
    cache.use_device(HERE, budget)
    return cache, ids, values


def read(cache, ids, chain=(0, 5)):
    return cache.fetch(ids, chain=chain, input_hashes=ids)


@pytest.mark.parametrize("share", [0, 3, 8])
def test_a_batch_is_put_together_from_copies_and_records(share):
    cache, ids, values = cache_of((share + 1) * 2400)
    for _ in range(3):
        order = torch.randperm(len(ids))
        (found,) = read(cache, order)
        assert torch.equal(found.tensors[0], values[order])
        assert found.rows.tolist() == list(range(8))
    counts = cache.counters
    assert (counts.hits, counts.misses, counts.device_hits) == (24, 0, 2 * share)
    assert cache.device_bytes == (2400 * (share + 1) if share else 0)


def test_records_of_other_boundaries_are_apart_from_copies():
    cache, ids, values = cache_of(10**6)
    cache.clear()
    cache.store(ids[:4], (values[:4],), boundary=1, fingerprint=5, input_hashes=ids[:4])
    cache.store(ids[4:], (values[4:],), boundary=2, fingerprint=6, input_hashes=ids[4:])
    for device_hits in (0, 4):
        below, top = read(cache, ids, chain=(0, 5, 6))
        assert (below.boundary, top.boundary) == (1, 2)
        assert below.rows.tolist() == [0, 1, 2, 3]
        assert torch.equal(top.tensors[0], values[4:])
        assert cache.counters.device_hits == device_hits


def test_a_cache_that_is_emptied_has_no_copies():
    cache, ids, _ = cache_of(10**6)
    read(cache, ids)
    cache.fail_audit("for the test")
    assert cache.device_bytes == 0 and read(cache, ids) == []


def test_what_is_copied_is_not_read_ahead_from_disk(tmp_path):
    cache, ids, values = cache_of(10**6, tmp_path)
    assert cache.disk_used_bytes > 0
    read(cache, ids)
    before = cache.disk_traffic.read_bytes
    for _ in range(3):
        cache.prefetch(ids.tolist())
        (found,) = read(cache, ids)
        assert torch.equal(found.tensors[0], values)
    assert before > 0 and cache.disk_traffic.read_bytes == before
    cache.close()


def test_another_device_begins_anew_and_none_ends_it():
    cache, ids, _ = cache_of(10**6)
    read(cache, ids)
    cache.use_device(HERE, 10**6)
    assert cache.device_bytes == 0
    read(cache, ids)
    assert cache.device_bytes > 0
    cache.use_device(HERE, 0)
    read(cache, ids)
    assert cache.device_bytes == 0 and cache.counters.device_hits == 0


@pytest.mark.parametrize("how", ["clear", "fail_audit"])
def test_copies_go_when_another_process_drops_the_records(how):
    maker, ids, values = cache_of(10**6)
    other = ActivationCache.attach(maker.address, run_id="copies")
    other.use_device(HERE, 10**6)
    for _ in range(2):
        (found,) = read(other, ids)
        assert torch.equal(found.tensors[0], values)
    assert other.counters.device_hits == len(ids)
    getattr(maker, how)(*["for the test"] * (how == "fail_audit"))
    assert read(other, ids) == [] and other.device_bytes == 0
    right = values + 1
    maker.store(ids, (right,), boundary=1, fingerprint=5, input_hashes=ids)
    for _ in range(2):  # from the slab, and from copies again
        (found,) = read(other, ids)
        assert torch.equal(found.tensors[0], right)
    assert other.counters.device_hits == 2 * len(ids)


def test_records_dropped_while_they_are_read_leave_no_copies(monkeypatch):
    cache, ids, values = cache_of(10**6)
    other = ActivationCache.attach(cache.address, run_id="copies")
    keep = DeviceTier.keep

    def dropped_before(self, *arguments):
        other.clear()
        return keep(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceTier, "keep", dropped_before)
        (found,) = read(cache, ids)
    assert torch.equal(found.tensors[0], values) and cache.device_bytes > 0
    assert read(cache, ids) == [] and cache.counters.device_hits == 0
