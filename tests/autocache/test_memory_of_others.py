"""What others wrote: a slab that does not fit together is refused, a record missed.

Whatever is at an address, and whoever writes into the memory later: no process that
attached reads or writes outside of it, and none ends.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import select
import struct

import pytest
import torch

from pipetransformer import _C
from pipetransformer.autocache import ActivationCache

from .test_cache import SAMPLES, make_cache, merged, values

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SIZES = 16  # num_samples, slot_bytes, arena_bytes, ragged
RUN_ID = 48
INDEX = 4096
SLOTS = INDEX + 64 * (SAMPLES * 8 // 64)
SLOT_BYTES = 4096
LARGEST = 2**64 - 1
ARENA = SAMPLES * SLOT_BYTES


def entry(begin, size=SLOT_BYTES):
    """An index word: where a slot is."""
    return (size // 64) << 37 | begin // 64


ENTRIES = [entry(k * SLOT_BYTES) for k in range(SAMPLES)]


def descriptor(cache):
    return json.loads(cache.address)["fd"]


def address(fd):
    return b'{"pid": %d, "fd": %d}' % (os.getpid(), fd)


def attach(fd):
    return ActivationCache.attach(address(fd), run_id="run")


@contextlib.contextmanager
def memory(content, size, seals=SEALS):
    """Sealed memory of this user that somebody else might have made."""
    fd = os.memfd_create("crafted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        os.pwrite(fd, content[:size], 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def superblock(num_samples=SAMPLES, slot_bytes=SLOT_BYTES, arena=ARENA, ragged=0):
    cache = make_cache()
    head = bytearray(os.pread(descriptor(cache), INDEX, 0))
    struct.pack_into("<QQQQ", head, SIZES, num_samples, slot_bytes, arena, ragged)
    return head


WHOLE = SLOTS + ARENA


def test_memory_that_fits_together_is_attached_to():
    with memory(superblock(), WHOLE) as fd:
        cache, ids = attach(fd), torch.arange(SAMPLES)
        assert cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1) == 40
        assert len(merged(cache.fetch(ids, chain=[0, 1]), SAMPLES)) == SAMPLES


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        # Products and sums that leave 64 bits and come out right.
        pytest.param((2**61, 4096, 4096), 8192, id="index-wraps-to-nothing"),
        pytest.param((2**61 - 1, 4096, 4096), 8192, id="index-wraps-by-alignment"),
        pytest.param((2**61 + 8, 4032, 4032), 8192, id="index-wraps-to-a-line"),
        pytest.param((40, 2**63, 0), SLOTS, id="slots-wrap-to-nothing"),
        pytest.param((40, 4096, 2**64 - 320), INDEX, id="arena-wraps"),
        pytest.param((2**61, 2**32, 2**64 - 4096), INDEX, id="all-wrap"),
        # Sizes that create() does not make.
        pytest.param((0, 4096, 4096), 8192, id="no-samples"),
        pytest.param((40, 4096, 0), SLOTS, id="no-slots"),
        pytest.param((40, 0, 4096), SLOTS + 4096, id="slots-of-nothing"),
        pytest.param((40, 4096, 41 * 4096), SLOTS + 41 * 4096, id="more-than-samples"),
        pytest.param((40, 192, 40 * 192), SLOTS + 40 * 192, id="slots-below-a-header"),
        pytest.param((40, 4100, 8200), SLOTS + 8200, id="slots-not-aligned"),
        pytest.param((40, 4096, 8192 + 64), SLOTS + 8192 + 64, id="half-a-slot"),
        pytest.param((40, 4096, ARENA), WHOLE - 4096, id="memory-too-short"),
        pytest.param((40, 4096, ARENA), WHOLE + 1, id="memory-too-long"),
        pytest.param((40, 4096, ARENA), 320, id="memory-below-a-superblock"),
        pytest.param((600, 4096, 4096), 8192, id="index-longer-than-the-memory"),
        pytest.param((40, 4096, ARENA, 2), WHOLE, id="neither-ragged-nor-not"),
        pytest.param((40, 4096, 4095, 1), SLOTS + 4095, id="ragged-not-aligned"),
        pytest.param((40, 4096, 2048, 1), SLOTS + 2048, id="ragged-below-a-slot"),
        pytest.param((LARGEST,) * 4, 8192, id="largest"),
    ],
)
def test_crafted_sizes_are_refused(sizes, size):
    with memory(superblock(*sizes), size) as fd:
        with pytest.raises(ValueError, match="address: expected a cache of format 4"):
            attach(fd)


def test_memory_of_another_user_is_refused():
    if os.geteuid() != 0:
        pytest.skip("only root can give memory to another user")
    with memory(superblock(), WHOLE) as fd:
        os.fchown(fd, 65534, -1)
        with pytest.raises(ValueError, match="of this user, got a file of user 65534"):
            attach(fd)
        os.fchown(fd, 0, 65534)
        assert attach(fd).num_samples == SAMPLES


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o602, 0o610, 0o777])
def test_memory_that_other_users_may_open_is_refused(mode):
    with memory(superblock(), WHOLE) as fd:
        os.fchmod(fd, mode)
        with pytest.raises(ValueError, match="got a file that other users may open"):
            attach(fd)


@pytest.mark.parametrize("missing", [0, 1, 2], ids=["shrink", "grow", "seal"])
def test_memory_without_one_of_the_seals_is_refused(missing):
    seals = [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL]
    del seals[missing]
    with memory(superblock(), WHOLE, seals[0] | seals[1]) as fd:
        with pytest.raises(ValueError, match="got a file without the seals"):
            attach(fd)


def test_memory_that_cannot_be_written_is_refused():
    with memory(superblock(), WHOLE, SEALS | fcntl.F_SEAL_WRITE) as fd:
        with pytest.raises(ValueError, match="address: expected a cache held by"):
            attach(fd)


def test_huge_pages_are_refused():
    # Touching one that the machine or a cgroup does not give is a SIGBUS.
    try:
        fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 1 << 30)  # a multiple of every size of pages
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(ValueError, match="got a file that is not in ordinary mem"):
            attach(fd)
    finally:
        os.close(fd)


def test_what_is_no_file_is_refused_and_not_opened(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    hangup = select.poll()
    hangup.register(reader, select.POLLHUP)
    others = [os.open(path, os.O_PATH) for path in (fifo, tmp_path, "/dev/null")]
    try:
        for fd in others:
            with pytest.raises(ValueError, match="of this user, got no file at /proc"):
                attach(fd)
        # A writer that came and went would have hung up.
        assert hangup.poll(0) == []
    finally:
        for fd in (*others, reader):
            os.close(fd)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"pid": 1}',
        b'{"pid": "a", "fd": 2}',
        b'{"pid": 1e400, "fd": 2}',
        b'{"pid": NaN, "fd": 2}',
        b'{"pid": 1.5, "fd": 2}',
        b'{"pid": true, "fd": 2}',
        b'{"pid": -1, "fd": 2}',
        b'{"pid": 1, "fd": 2}\n',
        b'{"pid": 12345678901, "fd": 2}',
        b'{"pid": 1, "fd": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"pid": 1, "fd": \xff}',
        '{"pid": ١, "fd": 2}'.encode(),
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_an_address_that_is_none_is_refused_in_short(text):
    with pytest.raises(ValueError, match="address: expected one made by") as refusal:
        ActivationCache.attach(text, run_id="run")
    assert len(str(refusal.value)) < 400


def test_a_run_id_of_others_reaches_the_console_without_its_escapes():
    for run_id in (b"\x1b]0;title\x07", b"\xff\xfe", b"two\nlines"):
        head = superblock()
        head[RUN_ID : RUN_ID + len(run_id) + 1] = run_id + b"\0"
        with memory(head, WHOLE) as fd:
            with pytest.raises(ValueError, match="run_id: expected 'run', got one tha"):
                attach(fd)


# --- after attaching -----------------------------------------------------------


def outcome(promise, *arguments):
    """Exit code of a process that keeps a promise; negative: it was killed."""
    process = multiprocessing.get_context("fork").Process(
        target=promise, args=arguments
    )
    process.start()
    process.join(100)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def use(cache, boundary):
    ids = torch.arange(SAMPLES)
    cache.fetch(ids, chain=list(range(100)))
    cache.store(ids, (values(ids, boundary),), boundary=boundary, fingerprint=boundary)
    for beyond in (SAMPLES, 2**40):
        with pytest.raises(ValueError, match="ids: expected sample ids in 0..39"):
            cache.fetch(torch.tensor([beyond]), chain=[0])
    assert (cache.num_samples, cache.num_slots) == (SAMPLES, SAMPLES)
    assert cache.slot_bytes == SLOT_BYTES


def use_while_sizes_change(sizes):
    maker, ids = make_cache(), torch.arange(SAMPLES)
    fd = descriptor(maker)
    reader = attach(fd)
    for boundary, cache in enumerate((maker, reader), start=1):
        cache.store(
            ids, (values(ids, boundary),), boundary=boundary, fingerprint=boundary
        )
        os.pwrite(fd, struct.pack("<QQQQ", *sizes), SIZES)
        assert len(merged(cache.fetch(ids, chain=[0, 1, 2]), SAMPLES)) == SAMPLES
        # Slots that the sizes now say are there, and are not.
        for word in (
            *(entry(ARENA), entry(ARENA - 64), entry(64), entry(0, 2 * SLOT_BYTES)),
            *(entry(2**40), entry(0, 2**31), entry(0, 64), 1, 2**63 - 1),
        ):
            os.pwrite(fd, struct.pack("<Q", word) * SAMPLES, INDEX)
            use(cache, 50 + boundary)
        os.pwrite(fd, struct.pack(f"<{SAMPLES}Q", *ENTRIES), INDEX)


@pytest.mark.parametrize(
    "sizes",
    [
        (2**61, 4096, 2**60, 0),
        (40, 2**40, 2**60, 1),
        (40, 2**60, ARENA, 0),
        (0, 0, 0, 1),
        (LARGEST, LARGEST, LARGEST, LARGEST),
    ],
)
def test_sizes_that_change_later_do_no_harm(sizes):
    assert outcome(use_while_sizes_change, sizes) == 0


def header(
    *,
    sample=0,
    tensors=((6, 1, 8),),
    num_tensors=None,
    payload_bytes=32,
    payload_checksum=0,
):
    """A record's header with a right checksum; tensors as (dtype, dims, sizes...)."""
    rows = b""
    for dtype, num_dims, *sizes in tensors:
        ragged, num_dims = divmod(num_dims, 256)
        codec, dtype = divmod(dtype, 256)
        rows += struct.pack("<BBBB", dtype, codec, num_dims, ragged)
        rows += struct.pack("<6I", *sizes, *[0] * (6 - len(sizes)))
    layout = struct.pack("<I", len(tensors) if num_tensors is None else num_tensors)
    layout += rows.ljust(6 * 28, b"\0")
    text = struct.pack("<QIIQQ", sample, 1, 0, 1, 0)
    text += struct.pack("<QQI", payload_bytes, payload_checksum, 0) + layout
    return text + struct.pack("<Q", _C.core.hash_bytes(text))


def written(verify="sampled", **fields):
    """A cache whose sample 0 has a crafted record in the place of the stored one."""
    cache, ids = make_cache(verify=verify), torch.arange(SAMPLES)
    cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
    fd = descriptor(cache)
    (word,) = struct.unpack("<Q", os.pread(fd, 8, INDEX))
    assert word >> 37 == SLOT_BYTES // 64, "the layout of the index has changed"
    place = SLOTS + word % 2**37 * 64 + 8
    stored = os.pread(fd, 232, place)
    (checksum,) = struct.unpack_from("<Q", stored, 40)
    own = header(payload_checksum=checksum)
    assert own == stored, "the layout of a header has changed"
    os.pwrite(fd, header(**{"payload_checksum": checksum, **fields}), place)
    return cache


def miss_and_mend(fields):
    cache, ids = written(**fields), torch.arange(SAMPLES)
    found = merged(cache.fetch(ids, chain=[0, 1]), SAMPLES)
    assert sorted(found) == list(range(1, SAMPLES))
    assert cache.counters.corrupt == 1
    # It does not stay in the way of the record that is computed instead.
    assert cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1) == 1
    found = merged(cache.fetch(ids, chain=[0, 1]), SAMPLES)
    assert torch.equal(found[0][1][0], values(ids, 1)[0])


HUGE = 2**32 - 1


@pytest.mark.parametrize(
    "fields",
    [
        dict(num_tensors=7),
        dict(num_tensors=HUGE),
        dict(num_tensors=0),
        dict(num_tensors=6),
        dict(tensors=((6, 7, 8),)),
        dict(tensors=((6, 255, 8),)),
        dict(tensors=((6, 256 + 0),), payload_bytes=8),  # ragged without a length
        dict(tensors=((6, 512 + 1, 8),)),  # neither ragged nor not
        dict(tensors=((6, 1, 9),)),
        dict(tensors=((6, 6, *[HUGE] * 6),)),
        dict(tensors=((6, 6, HUGE, HUGE, HUGE, HUGE, HUGE, 0),), payload_bytes=0),
        dict(tensors=((6, 6, 2**16, 2**16, 2**16, 2**14, 1, 1),), payload_bytes=0),
        dict(tensors=((6, 1, 2**30),), payload_bytes=2**32),
        dict(tensors=((6, 2, 2**30, 2**8),), payload_bytes=2**40),
        dict(tensors=((1, 1, 4096),), payload_bytes=4096),
        dict(payload_bytes=2**63),
        dict(payload_bytes=LARGEST),
        dict(payload_bytes=31),
        dict(tensors=((255, 1, 8),)),
        dict(tensors=((256 + 6, 1, 8),)),  # bf16 of another size
        dict(tensors=((256 * 3 + 6, 2, 4, 2),)),  # int8 that saves nothing
        dict(tensors=((256 + 4, 1, 8),), payload_bytes=16),  # bf16 of int64
        dict(tensors=((256 * 4 + 6, 1, 8),)),  # no codec
        dict(tensors=((12, 1, 8),)),  # a quantized type
        dict(sample=1),
    ],
    ids=str,
)
def test_a_record_with_right_checksums_and_wrong_values_is_missed(fields):
    assert outcome(miss_and_mend, fields) == 0


def fetch_every_type(verify):
    for dtype in range(256):
        cache = written(verify, tensors=((dtype, 2, 3, 0),), payload_bytes=0)
        groups = cache.fetch(torch.arange(SAMPLES), chain=[0, 1])
        found = merged(groups, SAMPLES)
        if verify == "all":  # its checksum is that of another payload
            assert sorted(found) == list(range(1, SAMPLES))
        assert len(found) == SAMPLES - cache.counters.corrupt >= SAMPLES - 1


@pytest.mark.parametrize("verify", ["sampled", "all"])
def test_a_record_of_any_type_is_a_tensor_or_a_miss(verify):
    assert outcome(fetch_every_type, verify) == 0


def fetch_from_noise(seed):
    draw = random.Random(seed)
    cache, ids = make_cache(verify="all"), torch.arange(SAMPLES)
    fd = descriptor(cache)
    for boundary in range(60):
        cache.store(ids, (values(ids, 1),), boundary=1, fingerprint=1)
        for _ in range(20):
            place = draw.choice([draw.randrange(WHOLE - 8), 8 * draw.randrange(1024)])
            word = draw.choice([draw.getrandbits(64), draw.randrange(64), LARGEST])
            os.pwrite(fd, struct.pack("<Q", word), place)
        use(cache, boundary)
        found = merged(cache.fetch(ids, chain=[0, 1]), SAMPLES)
        for row, (stored, (got,)) in found.items():
            assert torch.equal(got, values(ids, stored)[row])


def test_noise_in_the_memory_is_never_a_value():
    assert outcome(fetch_from_noise, 5) == 0
