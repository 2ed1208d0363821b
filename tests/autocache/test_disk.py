"""Records on disk: what the slab has no room for is served bit by bit, or missed."""

import gc
import json
import mmap
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import tempfile
import time

import pytest
import torch
from hypothesis import settings

from pipetransformer.autocache import ActivationCache, DiskTraffic, Ragged
from tests.support.ranks import Ranks, run_ranks

from .test_cache import SAMPLES, make_cache, merged, values
from .test_state_machine import NUM_SAMPLES, CacheMachine

IDS = torch.arange(SAMPLES)
CHAIN = [0, 1]
SLOTS = 10
BLOCK = 4096
PATIENCE_S = 60.0  # no test waits for it: reads end within milliseconds


@pytest.fixture(params=["threads", "io_uring"])
def io(request, tmp_path):
    if request.param == "io_uring":
        probe = make_cache(num_slots=1)
        probe.add_disk(tmp_path, io="io_uring")
        if store(probe) == 1:
            pytest.skip("no io_uring here")
    return request.param


def make(folder, *, io="any", slots=SLOTS, disk_bytes=None, **options):
    cache = make_cache(num_slots=slots, **options)
    cache.add_disk(folder, io=io, patience_s=PATIENCE_S, disk_bytes=disk_bytes)
    return cache


def attach(cache, io="any", **options):
    return ActivationCache.attach(
        cache.address,
        run_id="run",
        disk_patience_s=PATIENCE_S,
        disk_io=io,
        **options,
    )


def store(cache, ids=IDS, boundary=1):
    return cache.store(
        ids, (values(ids, boundary),), boundary=boundary, fingerprint=boundary
    )


def found_in(cache, ids=IDS, chain=CHAIN):
    """Return the boundaries of what hits, once each record was seen to be right."""
    found = merged(cache.fetch(ids, chain=chain), len(ids))
    for row, (boundary, (got,)) in found.items():
        assert torch.equal(got, values(ids[row : row + 1], boundary)[0])
    return {row: boundary for row, (boundary, _) in found.items()}


def descriptors(cache):
    """Return those of the index and of the file."""
    return json.loads(cache.address)["disk"]


def test_hits_equal_what_was_stored_bit_by_bit(tmp_path, io):
    cache = make(tmp_path, io=io)
    assert store(cache) == SAMPLES
    shuffled = IDS[torch.randperm(SAMPLES)]
    assert len(found_in(cache, shuffled)) == SAMPLES
    cache.prefetch(shuffled[:20].tolist())
    cache.prefetch([-1, SAMPLES, 2**62])
    (group,) = cache.fetch(shuffled, chain=CHAIN)
    assert torch.equal(group.rows, IDS), "rows are in their order, whatever the tier"
    assert torch.equal(group.tensors[0], values(shuffled, 1))
    counts = cache.counters
    assert (counts.hits, counts.disk_hits) == (2 * SAMPLES, 2 * (SAMPLES - SLOTS))
    assert (counts.full, counts.late, counts.corrupt) == (0, 0, 0)
    assert cache.disk_used_bytes == (SAMPLES - SLOTS) * BLOCK
    assert cache._store.disk().io == io  # noqa: SLF001


def test_tuples_of_all_dtypes_and_ragged_rows_come_back(tmp_path, io):
    ragged = Ragged(lambda inputs: None, dim=(1, 1, None), fill=(0.0, 1.0, 0.0))
    lengths = torch.arange(SAMPLES) % 6
    wide = torch.randn(SAMPLES, 5, 700, dtype=torch.bfloat16)
    mask = torch.ones(SAMPLES, 5, dtype=torch.bool)
    for row, length in enumerate(lengths):
        wide[row, length:], mask[row, length:] = 0, True
    plain = torch.randn(SAMPLES, 3, dtype=torch.complex64)
    cache = make(tmp_path, io=io, ragged=True, slot_bytes=8192)
    tensors = (wide, mask, plain)
    cache.store(IDS, tensors, boundary=1, fingerprint=1, ragged=ragged, lengths=lengths)
    (group,) = cache.fetch(IDS, chain=CHAIN, ragged=ragged, length=5)
    assert len(group.rows) == SAMPLES and cache.counters.disk_hits > 0
    assert torch.equal(group.lengths, lengths[group.rows])
    for got, put in zip(group.tensors, tensors, strict=True):
        assert torch.equal(got, put[group.rows])


def test_what_misses_in_memory_misses_on_disk(tmp_path, io):
    """Prefixes, inputs, advance and unfreeze: the same in both tiers."""
    results = []
    for cache in (make(tmp_path, io=io), make_cache()):
        hashes = IDS * 3
        x = values(IDS, 1)
        cache.store(IDS, (x,), boundary=1, fingerprint=1, input_hashes=hashes)
        changed = hashes.clone()
        changed[::3] += 1
        groups = [
            cache.fetch(IDS, chain=CHAIN, input_hashes=changed),
            cache.fetch(IDS, chain=[0, 7]),
        ]
        store(cache, IDS[::2], boundary=2)
        groups.append(cache.fetch(IDS, chain=[0, 1, 2]))
        groups.append(cache.fetch(IDS, chain=[0, 1]))
        store(cache, IDS, boundary=1)
        groups.append(cache.fetch(IDS, chain=[0, 1]))
        counts = cache.counters
        results.append(
            (
                [merged(each, SAMPLES).keys() for each in groups],
                (counts.hits, counts.misses, counts.stale, counts.changed),
                (counts.stored, counts.skipped, counts.full),
            )
        )
    assert results[0] == results[1]


def test_a_record_that_outgrew_its_slot_is_on_disk_alone(tmp_path, io):
    cache = make_cache()
    cache._store.create_disk(  # noqa: SLF001 - larger than all records are to be
        run_id="run",
        directory=str(tmp_path),
        bytes=SAMPLES * 3 * BLOCK,
        least_bytes=0,
        patience_ms=round(1000 * PATIENCE_S),
        io=io,
    )
    store(cache)
    wide = torch.randn(SAMPLES, 3000)
    assert cache.store(IDS, (wide,), boundary=2, fingerprint=2) == SAMPLES
    (group,) = cache.fetch(IDS, chain=[0, 1, 2])
    assert group.boundary == 2 and torch.equal(group.tensors[0], wide[group.rows])
    assert found_in(cache) == {}
    # And back again, into the slots that are still theirs.
    assert store(cache) == SAMPLES
    assert len(found_in(cache, chain=[0, 1, 2])) == SAMPLES
    assert cache.counters.disk_hits == SAMPLES


def test_a_full_file_leaves_the_rest_without_room(tmp_path, io, caplog):
    cache = make(tmp_path, io=io, disk_bytes=5 * BLOCK)
    assert cache.disk_records == 5
    assert store(cache) == SLOTS + 5
    assert cache.counters.full == SAMPLES - SLOTS - 5
    assert len(found_in(cache)) == SLOTS + 5
    assert caplog.text.count("no slot") == 1


def test_clear_and_close_are_of_both_tiers(tmp_path, io):
    cache = make(tmp_path, io=io)
    store(cache)
    cache.prefetch(IDS.tolist())
    cache.clear()
    assert found_in(cache) == {}
    assert store(cache) == SAMPLES
    cache.prefetch(IDS.tolist())
    cache.close()
    with pytest.raises(ValueError, match="got a closed one"):
        cache.fetch(IDS, chain=CHAIN)
    cache.prefetch(IDS.tolist())


def test_records_are_kept_and_come_back_from_both_tiers(tmp_path, io):
    cache = make(tmp_path, io=io)
    store(cache)
    path = tmp_path / "kept"
    with open(path, "w+b") as file:
        kept = cache.save(file.fileno(), 0)
        assert (kept.records, kept.damaged) == (SAMPLES, 0)
        other = make(tmp_path, io=io, slots=3)
        loaded = other.load(file.fileno(), 0, kept.bytes)
        assert (loaded.records, loaded.taken) == (SAMPLES, SAMPLES)
        assert other.load(file.fileno(), 0, kept.bytes).taken == 0
    assert len(found_in(other)) == SAMPLES
    assert other.counters.disk_hits == SAMPLES - 3


# -- what others did to the file ------------------------------------------------


def change_block(descriptor, number, change):
    """Write a block of the file again, which O_DIRECT wants in aligned memory."""
    with mmap.mmap(-1, BLOCK) as block:
        assert os.preadv(descriptor, [block], number * BLOCK) == BLOCK
        change(block)
        assert os.pwritev(descriptor, [block], number * BLOCK) == BLOCK


def test_no_flipped_bit_is_served(tmp_path):
    cache, rng = make(tmp_path, slots=1, slot_bytes=8192), random.Random(0)
    width = 1500  # two blocks each, the second filled in part
    x = torch.randn(SAMPLES, width)

    def put(ids):
        cache.store(ids, (x[ids],), boundary=1, fingerprint=1)

    put(IDS)
    _, file = descriptors(cache)
    blocks = cache.disk_used_bytes // BLOCK
    missed = 0
    for _ in range(1000):
        bit = rng.randrange(8 * BLOCK)

        def flip(block, bit=bit):
            block[bit // 8] ^= 1 << bit % 8

        change_block(file, rng.randrange(blocks), flip)
        (group,) = cache.fetch(IDS, chain=CHAIN)
        assert torch.equal(group.tensors[0], x[group.rows])
        lost = IDS[~torch.isin(IDS, group.rows)]
        assert len(lost) <= 1
        missed += len(lost)
        put(lost)
    # Some bits are behind the record's end.
    assert cache.counters.corrupt == missed > 500


def test_records_of_others_in_its_place_are_not_served(tmp_path):
    cache = make(tmp_path)
    store(cache)
    _, file = descriptors(cache)
    blocks = []
    for number in range(SAMPLES - SLOTS):
        change_block(file, number, lambda block: blocks.append(bytes(block)))

    def replace(number):
        def change(block):
            block[:] = blocks[(number + 1) % len(blocks)]

        return change

    for number in range(SAMPLES - SLOTS):
        change_block(file, number, replace(number))
    assert sorted(found_in(cache)) == list(range(SLOTS))
    assert cache.counters.corrupt == SAMPLES - SLOTS


def test_a_file_cut_short_is_read_as_far_as_it_goes(tmp_path, caplog):
    cache = make(tmp_path)
    store(cache)
    index, file = descriptors(cache)
    os.ftruncate(file, 3 * BLOCK)
    assert len(found_in(cache)) == SLOTS + 3
    assert "nothing more is read on disk" in caplog.text
    with pytest.raises(ValueError, match="got a file of 12288 bytes"):
        attach_to(index, file)


def attach_to(index, file):
    path = f"/proc/{os.getpid()}/fd/"
    other = make_cache(num_slots=SLOTS)
    other._store.attach_disk(  # noqa: SLF001
        run_id="run",
        index_path=path + str(index) if isinstance(index, int) else str(index),
        file_path=path + str(file) if isinstance(file, int) else str(file),
        patience_ms=1000,
        io="any",
    )
    return other


def test_what_is_not_the_cache_of_this_run_and_user_is_refused(tmp_path):
    cache, stranger = make(tmp_path), make(tmp_path)
    store(cache)
    index, file = descriptors(cache)
    assert len(found_in(attach_to(index, file))) == SAMPLES - SLOTS
    foreign = descriptors(stranger)[1]
    with pytest.raises(ValueError, match="not the one of the index"):
        attach_to(index, foreign)
    copy = tmp_path / "copy"
    copy.write_bytes(bytes(cache.disk_records * BLOCK))
    copy.chmod(0o600)
    (tmp_path / "link").symlink_to(copy)
    for path in (copy, tmp_path / "link"):
        with pytest.raises(ValueError, match="not the one of the index"):
            attach_to(index, path)
    with pytest.raises(ValueError, match="got no file"):
        attach_to(index, tmp_path)
    with pytest.raises(ValueError, match="index of records on disk of format 1"):
        attach_to(json.loads(cache.address)["fd"], file)
    with pytest.raises(ValueError, match="sealed shared memory"):
        attach_to(file, file)
    os.fchmod(file, 0o602)
    with pytest.raises(ValueError, match="other users may open"):
        attach_to(index, file)
    os.fchmod(file, 0o600)
    attach_to(index, file)
    if os.geteuid() == 0:
        os.fchown(file, 65534, -1)
        with pytest.raises(ValueError, match="a file of user 65534"):
            attach_to(index, file)


def test_an_index_of_random_words_is_never_followed_out_of_the_file(tmp_path):
    cache, rng = make(tmp_path), random.Random(1)
    store(cache)
    index, _ = descriptors(cache)
    entries, size = 4096, os.fstat(index).st_size
    for _ in range(300):
        at = rng.randrange(entries, size, 8)
        word = rng.choice([rng.getrandbits(64), rng.getrandbits(20), 2**64 - 1])
        # States that nobody waits for: a writer's pid may be that of a process.
        if (at - entries) % 56 == 0:
            word = word & ~3 | rng.choice([0, 2])
        os.pwrite(index, word.to_bytes(8, "little"), at)
        cache.prefetch(IDS[:5].tolist())
        found_in(cache)
        store(cache, IDS[rng.randrange(SAMPLES) :])


def test_an_address_whose_disk_is_refused_serves_what_is_in_memory(tmp_path, caplog):
    cache = make(tmp_path)
    store(cache)
    os.fchmod(descriptors(cache)[1], 0o644)
    other = attach(cache)
    assert sorted(found_in(other)) == list(range(SLOTS))
    assert "nothing on disk for this process" in caplog.text
    assert not other.has_disk


# -- several processes ------------------------------------------------------------


def fetch_and_store(rank, address, io):
    """What another process sees; it then advances the upper half."""
    cache = ActivationCache.attach(
        address, run_id="run", disk_patience_s=PATIENCE_S, disk_io=io
    )
    found = found_in(cache)
    store(cache, IDS[SAMPLES // 2 :], boundary=2)
    return len(found), cache.counters.disk_hits


@pytest.mark.distributed
def test_attached_process_reads_and_adds_records(tmp_path, io):
    cache = make(tmp_path, io=io)
    store(cache)
    assert run_ranks(fetch_and_store, 1, cache.address, io) == [
        (SAMPLES, SAMPLES - SLOTS)
    ]
    found = found_in(cache, chain=[0, 1, 2])
    assert found == {row: 1 + (row >= SAMPLES // 2) for row in range(SAMPLES)}


def write_forever(rank, address, io, ready):
    cache = ActivationCache.attach(address, run_id="run", disk_io=io)
    for boundary in range(2, 1_000_000):
        store(cache, IDS, boundary=boundary)
        open(ready, "w").close()


@pytest.mark.distributed
def test_kill_of_a_writer_leaves_whole_records_and_usable_places(tmp_path, io):
    cache, rng = make(tmp_path, io=io), random.Random(2)
    chain = list(range(100_000))
    for attempt in range(3):
        ready = tmp_path / str(attempt)
        # Not forked from a server, which would reap it at once.
        ranks = Ranks(write_forever, 1, cache.address, io, str(ready), fresh=True)
        deadline = time.monotonic() + 100
        while not ready.exists():
            assert ranks.processes[0].is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() / 10)
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        stat = pathlib.Path(f"/proc/{ranks.processes[0].pid}/stat")
        while stat.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert len(found_in(cache, chain=chain)) > 0
        assert cache.counters.corrupt == 0
        assert store(cache, boundary=1) == SAMPLES
        assert len(found_in(cache)) == SAMPLES
        ranks.close()


def use_in_child(cache):
    found = found_in(cache)
    cache.prefetch(IDS.tolist())
    stored = store(cache, boundary=2)
    cache.close()
    os._exit(0 if (len(found), stored) == (SLOTS, SLOTS) else 1)


def test_forked_child_finds_nothing_on_disk_and_ends(tmp_path, io):
    cache = make(tmp_path, io=io)
    store(cache)
    cache.prefetch(IDS[-5:].tolist())
    child = multiprocessing.get_context("fork").Process(
        target=use_in_child, args=(cache,)
    )
    child.start()
    child.join(100)
    assert child.exitcode == 0
    found = found_in(cache, chain=[0, 1, 2])
    assert found == {row: 2 if row < SLOTS else 1 for row in range(SAMPLES)}


# -- room --------------------------------------------------------------------------


def limited(rank, folder, io):
    """Use a cache whose file must not grow, nor be written behind a place."""
    cache, second = make(folder, io=io), make_cache(num_slots=SLOTS)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * BLOCK, resource.RLIM_INFINITY))
    stored = store(cache)
    found = len(found_in(cache))
    with pytest.raises(OSError, match="reserve .* bytes on disk"):
        second.add_disk(folder)
    return stored, found


@pytest.mark.distributed
def test_a_disk_that_takes_no_more_ends_writing(tmp_path, io):
    ((stored, found),) = run_ranks(limited, 1, str(tmp_path), io)
    assert stored == found
    assert SLOTS <= stored <= SLOTS + 5


def test_a_folder_that_cannot_be_used_is_an_error_before_use(tmp_path):
    cache = make_cache(num_slots=SLOTS)
    with pytest.raises(OSError, match="No such file"):
        cache.add_disk(tmp_path / "none")
    with pytest.raises(ValueError, match=r"^disk_bytes: expected at least 4096"):
        cache.add_disk(tmp_path, disk_bytes=100)
    assert not cache.has_disk and store(cache) == SLOTS


def test_the_file_has_no_name_and_is_for_this_user_alone(tmp_path):
    cache = make(tmp_path)
    info = os.fstat(descriptors(cache)[1])
    assert (info.st_nlink, info.st_mode & 0o777) == (0, 0o600)
    assert info.st_size == SAMPLES * BLOCK
    assert list(tmp_path.iterdir()) == []


def test_descriptors_threads_and_memory_do_not_grow(tmp_path, io):
    def once():
        cache = make(tmp_path, io=io)
        other = attach(cache, io)
        store(cache)
        other.prefetch(IDS.tolist())
        found_in(other)
        cache.prefetch(IDS.tolist())
        cache.close()
        other.close()

    def used():
        gc.collect()
        statm = pathlib.Path("/proc/self/statm").read_text().split()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            int(statm[1]) * BLOCK,
        )

    for _ in range(20):
        once()
    before = used()
    for _ in range(200):
        once()
    after = used()
    assert after[:2] == before[:2]
    assert after[2] < before[2] + 32 * 2**20


def test_what_is_on_disk_can_be_told(tmp_path):
    cache = make(tmp_path)
    assert f"MB on disk in {tmp_path}, " in cache.disk_text
    assert make_cache(num_slots=SLOTS).disk_text == "nothing on disk"


def test_traffic_counts_whole_blocks_and_the_time_that_they_took(tmp_path):
    cache = make(tmp_path)
    assert cache.disk_traffic == DiskTraffic()
    store(cache)
    written = cache.disk_traffic
    assert written.written_bytes == cache.disk_used_bytes > 0
    assert written.write_ns > 0 and written.read_ns == written.read_bytes == 0
    found_in(cache)
    read = cache.disk_traffic
    assert read.read_bytes == written.written_bytes
    assert 0 < read.read_ns <= read.wait_ns
    cache.prefetch(IDS.tolist())
    found_in(cache)
    assert cache.disk_traffic.read_bytes == 2 * read.read_bytes


def test_without_the_disk_only_memory_is_read_and_written(tmp_path):
    cache = make(tmp_path)
    stored = cache.store(IDS, (values(IDS, 1),), boundary=1, fingerprint=1, disk=False)
    assert stored == SLOTS and cache.disk_traffic == DiskTraffic()
    store(cache)
    found = cache.fetch(IDS, chain=CHAIN, disk=False)
    assert sum(len(records.rows) for records in found) == SLOTS
    assert cache.disk_traffic.read_bytes == 0
    assert len(found_in(cache)) == SAMPLES


class DiskMachine(CacheMachine):
    """The same with eight slots, and room on disk for the others."""

    room = NUM_SAMPLES
    options = {"disk_patience_s": PATIENCE_S}

    def add_tiers(self, cache):
        cache.add_disk(tempfile.gettempdir(), patience_s=PATIENCE_S)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    deadline=None, max_examples=40, stateful_step_count=30
)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_encoded_records_are_on_disk_as_in_memory(tmp_path, io, codec):
    x = torch.randn(SAMPLES, 6, 32)
    given = {"boundary": 1, "fingerprint": 1}
    fetched = []
    for cache in (make(tmp_path, io=io, slots=1), make_cache()):
        assert cache.store(IDS, (x,), **given, codec=codec) == SAMPLES
        assert cache.fetch(IDS, chain=CHAIN) == []
        assert cache.store(IDS, (x,), **given, codec=codec) == 0
        (group,) = cache.fetch(IDS, chain=CHAIN, codec=codec)
        fetched.append(group.tensors[0])
        # Those without an encoding take their places, and serve both.
        assert cache.store(IDS, (x,), **given) == SAMPLES
        assert cache.store(IDS, (x,), **given, codec=codec) == 0
        (group,) = cache.fetch(IDS, chain=CHAIN)
        assert torch.equal(group.tensors[0], x)
    assert torch.equal(*fetched) and not torch.equal(fetched[0], x)
