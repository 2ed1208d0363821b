"""What a cache does on a disk that fails or is slow, each in a process of its own.

    LD_PRELOAD=... python -m tests.autocache.disk_faults CASE FOLDER

Needs the library of ``disk_faults.c``. Prints what happened as JSON.
"""

import ctypes
import errno
import json
import logging
import os
import sys
import time

import torch

from pipetransformer.autocache import ActivationCache
from tests.autocache.test_cache import SAMPLES, make_cache, merged, values
from tests.engine.test_disk_cache import train

IDS = torch.arange(SAMPLES)
SLOTS = 10
CHAIN = [0, 1]
_FOR_EVER = 10**6


def faults(*, read=0, write=0, read_ms=0):
    ctypes.CDLL(None).disk_faults_set(read, write, read_ms)


def opened(folder, **options):
    cache = make_cache(num_slots=SLOTS)
    cache.add_disk(folder, io="threads", **options)
    return cache


def stored(cache):
    return cache.store(IDS, (values(IDS, 1),), boundary=1, fingerprint=1)


def hits(cache):
    """Return the ids that hit, once each was seen to be right."""
    found = merged(cache.fetch(IDS, chain=CHAIN), SAMPLES)
    for row, (_, (got,)) in found.items():
        assert torch.equal(got, values(IDS[row : row + 1], 1)[0])
    return sorted(found)


def write_fails(folder, error):
    cache = opened(folder, patience_s=60)
    faults(write=error)
    first = stored(cache)
    faults()
    again = stored(cache)
    counts = cache.counters
    return {
        "stored": first,
        "again": again,
        "hits": hits(cache),
        "full": counts.full,
    }


def full(folder):
    return write_fails(folder, errno.ENOSPC)


def bad_writes(folder):
    return write_fails(folder, errno.EIO)


def bad_reads(folder):
    """All reads fail; then the disk is well again, but is asked no more."""
    cache = opened(folder, patience_s=60)
    put = stored(cache)
    faults(read=errno.EIO)
    failing = hits(cache)
    late = cache.counters.late
    cache.prefetch(IDS.tolist())
    faults()
    return {"stored": put, "hits": failing, "late": late, "after": hits(cache)}


def few_bad_reads(folder):
    """Fewer reads fail than end reading."""
    cache = opened(folder, patience_s=60)
    stored(cache)
    faults(read=errno.EIO)
    one = merged(cache.fetch(IDS[-3:], chain=CHAIN), 3)
    faults()
    return {"hits": sorted(one), "late": cache.counters.late, "after": hits(cache)}


def slow(folder):
    """What was asked for ahead is there when the disk turns slow, the rest is late."""
    cache = opened(folder, patience_s=0.2)
    stored(cache)
    cache.prefetch(IDS[SLOTS : SLOTS + 4].tolist())
    time.sleep(5)
    faults(read_ms=_FOR_EVER)
    found = hits(cache)
    late = cache.counters.late
    faults()
    return {"hits": found, "late": late, "after": opened_hits(cache)}


def opened_hits(cache):
    """Ask until no read is late."""
    for _ in range(100):
        late = cache.counters.late
        found = hits(cache)
        if cache.counters.late == late:
            return found
    return []


def hung(folder):
    """Nobody waits for reads that never end, not even the end of the process."""
    cache = opened(folder, patience_s=0.2)
    stored(cache)
    faults(read_ms=_FOR_EVER)
    found = hits(cache)
    cache.prefetch(IDS.tolist())
    cache.close()
    return {"hits": found}


def saved(folder):
    """What is kept of records that a slow disk reads, and one that never ends."""
    cache = opened(folder, patience_s=0.05)
    stored(cache)
    found = {}
    for name, read_ms in (("slow", 300), ("hung", _FOR_EVER)):
        faults(read_ms=read_ms)
        with open(f"{folder}/{name}", "w+b") as file:
            found[name] = cache.save(file.fileno(), 0).records
        faults()
        read = make_cache(num_slots=SAMPLES)
        with open(f"{folder}/{name}", "rb") as file:
            read.load(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            found[f"{name}, read"] = len(hits(read))
    return found


def training(folder):
    """A run with a small slab, once on a disk whose reads never end."""
    add_disk, read_ms = ActivationCache.add_disk, 0

    def add(self, *arguments, **options):
        faults()  # to make a file, a disk must answer
        add_disk(self, *arguments, **options, io="threads", patience_s=0.01)
        faults(read_ms=read_ms)

    ActivationCache.add_disk = add
    expected = train(folder)[0]
    read_ms = _FOR_EVER
    losses, _, history, *_ = train(folder)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    late = sum(counts["late"] for counts in history.cache)
    return {"same": apart < 1e-5, "late": late > 0}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
