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

import pipetransformer as pt
from pipetransformer import autocache, planner
from pipetransformer.autocache import ActivationCache, TierRates, measure_disk_rates
from pipetransformer.run.cache_costs import CacheCosts
from tests.autocache.test_cache import SAMPLES, make_cache, merged, values
from tests.engine.even_profile import even_profile
from tests.engine.scenario import config, make_engine, schedule
from tests.engine.test_disk_cache import LITTLE, SIZE, train
from tests.support.toy import ToySet

IDS = torch.arange(SAMPLES)
SLOTS = 10
CHAIN = [0, 1]
_FOR_EVER = 10**6


def faults(*, read=0, write=0, read_ms=0):
    ctypes.CDLL(None).disk_faults_set(read, write, read_ms)


def limit(bytes_per_s):
    ctypes.CDLL(None).disk_faults_limit(ctypes.c_long(bytes_per_s))


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
    # Measured, such a disk would not be used.
    losses, _, history, *_ = train(folder, admission="always")
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    late = sum(counts["late"] for counts in history.cache)
    return {"same": apart < 1e-5, "late": late > 0}


def rates(folder):
    """What is measured of a disk as it is, and of one whose reads are limited."""
    add_disk = ActivationCache.add_disk
    ActivationCache.add_disk = lambda *args, **options: add_disk(
        *args, **options, io="threads"
    )
    found = {}
    for name, rate in (("as it is", 0), ("limited", 2 * 10**6)):
        limit(rate)
        measured = measure_disk_rates(20_000, folder, num_samples=200)
        found[name] = measured.bytes_per_s
    return found


EPOCHS = 6


def priced(folder, bytes_per_s, *, from_epoch=0):
    """A run with frozen layers, most of whose records are on a disk.

    Args:
        folder: Where.
        bytes_per_s: To which reads are limited; 0: to nothing.
        from_epoch: From then on; the disk is measured before. A run that is alike
            throughout goes by what was measured at its start: what the toy's layers
            really take, far less than its profile says, would turn some runs.
    """
    if from_epoch == 0:
        CacheCosts.observe = lambda *_: None
    add_disk = ActivationCache.add_disk
    ActivationCache.add_disk = lambda *args, **options: add_disk(
        *args, **options, io="threads"
    )
    planner.profile = even_profile
    autocache.measure_rates = lambda *_, **__: TierRates(
        bytes_per_s=10**10,
        record_ns=1000,
        write_bytes_per_s=10**10,
        write_record_ns=1000,
    )
    engine = make_engine(
        freeze=schedule(*[2] * EPOCHS),
        config=config(
            cache=pt.CacheConfig(disk_directory=folder, budget_bytes=LITTLE),
            plan=pt.PlanConfig(num_stages=1, num_microbatches=2),
        ),
    )
    if from_epoch == 0:
        limit(bytes_per_s)
    with engine:
        for epoch in engine.epochs(EPOCHS):
            if epoch == from_epoch:
                limit(bytes_per_s)
            for batch in engine.batches(ToySet(SIZE), 12):
                engine.step(batch)
        explained = engine.explain()
        history = engine.history
    return {
        "losses": [record.train_loss for record in history.epochs],
        "on_disk": [counts["disk_hits"] + counts["late"] for counts in history.cache],
        "hits": [record.cache_hits for record in history.epochs],
        "tier": explained.plan.cache,
        "text": explained.cache["text"],
        "report": str(explained),
    }


def never_slow(folder):
    return priced(folder, 0)


def always_slow(folder):
    return priced(folder, 5 * 10**4)


def slow_later(folder):
    return priced(folder, 5 * 10**4, from_epoch=2)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
