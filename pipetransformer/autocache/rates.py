"""How fast records are read and written here: measured on small caches of their own."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer.autocache.admission import TierRates
from pipetransformer.autocache.cache import ActivationCache, hash_rows
from pipetransformer.autocache.device_tier import DeviceTier, Version
from pipetransformer.autocache.records import Records
from pipetransformer.autocache.sizes import bytes_on_disk, least_budget, record_bytes
from pipetransformer.core.devices import HOST

_LOG = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20  # of the cache: most processors' own caches hold less
_MOST_ROWS = 4096
_NARROW_BYTES = 64
_SECONDS = 0.02  # of reads, for each width; writes are made once
_DISK_SECONDS = 0.05  # of its writes, and of its reads
_LEAST_BYTES_SHARE = 0.05  # of a record's time: what its bytes take is never nothing
_MOST_DISK_BYTES = 32 << 20
_LEAST_DISK_BYTES = 1024  # of a record: it takes a block even so
_DISK_BATCH_BYTES = 1 << 20
_BATCHES_AHEAD = 4
_NANOSECONDS = 1e9


def measure_rates(
    record_size: int,
    *,
    rows: int,
    num_samples: int,
    hashed: Sequence[Tensor] = (),
    device: torch.device = HOST,
) -> TierRates | None:
    """Measure reads and writes of host memory; takes 0.1 s at most as a rule.

    Records of two sizes are written and read in batches, in random order: the narrow
    ones take what a record takes whatever its size, and what the wide ones take more is
    the rate. The memory is touched first by the writes, as that of a run is.

    Args:
        record_size: Bytes of the run's records.
        rows: Of a batch.
        num_samples: Of the set: one that fits the processor's caches is read faster.
        hashed: Inputs of some rows, if a look-up has to hash them; that counts as part
            of a read.
        device: What is read goes there, which counts, too.

    Returns:
        The rates; None where the memory cannot be had, or the inputs cannot be hashed,
        which is logged.
    """
    wide = max(_NARROW_BYTES, min(record_size, _MOST_BYTES // 2))
    try:
        hashing = _hash_seconds(hashed)
        narrow_read, narrow_write = _row_seconds(
            _NARROW_BYTES, rows, num_samples, device
        )
        wide_read, wide_write = _row_seconds(wide, rows, num_samples, device)
    except (MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        _LOG.warning("cache: its rates are not known: %s", error)
        return None
    return TierRates(
        bytes_per_s=_bytes_per_s(wide, narrow_read, wide_read),
        record_ns=round((narrow_read + hashing) * _NANOSECONDS),
        write_bytes_per_s=_bytes_per_s(wide, narrow_write, wide_write),
        write_record_ns=round(narrow_write * _NANOSECONDS),
    )


def measure_device_rates(
    record_size: int,
    device: torch.device,
    *,
    rows: int,
    num_samples: int,
    hashed: Sequence[Tensor] = (),
) -> TierRates | None:
    """Measure reads of copies on a device; takes 0.1 s at most as a rule.

    Args:
        record_size: Bytes of the run's records, as they are used.
        device: That holds the copies.
        rows: Of a batch.
        num_samples: Of the set.
        hashed: As in `measure_rates`.

    Returns:
        The rates, those of writes being what reads take; None where the memory cannot
        be had, which is logged.
    """
    wide = max(_NARROW_BYTES, min(record_size, _MOST_BYTES // 2))
    try:
        hashing = _hash_seconds(hashed)
        narrow = _copy_seconds(_NARROW_BYTES, rows, num_samples, device)
        whole = _copy_seconds(wide, rows, num_samples, device)
    except (MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        _LOG.warning("cache: rates of %s are not known: %s", device, error)
        return None
    rate = _bytes_per_s(wide, narrow, whole)
    record_ns = round((narrow + hashing) * _NANOSECONDS)
    return TierRates(
        bytes_per_s=rate,
        record_ns=record_ns,
        write_bytes_per_s=rate,
        write_record_ns=record_ns,
    )


def _copy_seconds(
    width: int, rows: int, num_samples: int, device: torch.device
) -> float:
    """Return what a read of a copy takes, in seconds."""
    count = min(num_samples, _MOST_ROWS, max(2, _MOST_BYTES // width))
    rows = min(rows, count)
    tier = DeviceTier(device, (count + 1) * width, count, count)
    version, keys = Version(1, "native"), torch.zeros(count, dtype=torch.int64)
    tier.find(version, 1, keys[:1], keys[:1], None, None)
    ids = torch.arange(count)
    values = torch.zeros(count, width, dtype=torch.uint8)
    tier.keep(ids, keys, Records(1, ids, (values,)), None)
    reads: list[float] = []
    generator = torch.Generator().manual_seed(0)  # not the user's
    until = time.perf_counter() + _SECONDS
    while not reads or time.perf_counter() < until:
        ids = torch.randint(0, count, (rows,), generator=generator)
        began = time.perf_counter()
        found = tier.find(version, 1, ids, keys[:rows], None, None)
        if found is None:
            raise MemoryError(f"no room for {count} copies of {width} bytes")
        _wait_for([found], device)
        reads.append((time.perf_counter() - began) / rows)
    return sorted(reads)[len(reads) // 2]


def _wait_for(found: Sequence[Records], device: torch.device) -> None:
    if found and device != HOST:
        torch.accelerator.synchronize(device)


def measure_disk_rates(
    record_size: int,
    directory: str | os.PathLike[str],
    *,
    num_samples: int,
) -> TierRates | None:
    """Measure reads and writes of a disk; takes 0.2 s at most as a rule.

    Records are written and then read ahead in random order, past the page cache where
    the file system lets it, for 0.1 s in all or until there are 32 MB. A disk that
    slows down later is found out by the run itself.

    Args:
        record_size: Bytes of the run's records.
        directory: Where a file without a name is made.
        num_samples: Of the set.

    Returns:
        The rates, of whole blocks, with reads that run alongside the step; None where
        there is no such file or nothing came back, which is logged.
    """
    wide = max(_LEAST_DISK_BYTES, min(record_size, _MOST_DISK_BYTES // 2))
    try:
        return _disk_rates(wide, directory, num_samples)
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        _LOG.warning(
            "cache: the rates of its disk are not known, it is not used: %s", error
        )
        return None


def _disk_rates(
    width: int, directory: str | os.PathLike[str], num_samples: int
) -> TierRates | None:
    slot = record_bytes([torch.empty(1, width, dtype=torch.uint8)])
    place = bytes_on_disk(slot)
    count = min(num_samples, _MOST_ROWS, max(2, _MOST_DISK_BYTES // place))
    rows = min(count, max(1, _DISK_BATCH_BYTES // place))
    source = torch.zeros(rows, width, dtype=torch.uint8)
    cache = ActivationCache.create(
        run_id="rates",
        num_samples=count,
        slot_bytes=slot,
        budget_bytes=least_budget(count, slot),  # almost all go to the disk
    )
    try:
        cache.add_disk(directory, disk_bytes=count * place)
        keys = torch.zeros(count, dtype=torch.int64)
        until, stored = time.perf_counter() + _DISK_SECONDS, 0
        while stored < count and (not stored or time.perf_counter() < until):
            ids = torch.arange(stored, min(stored + rows, count))
            cache.store(
                ids,
                (source[: len(ids)],),
                boundary=1,
                fingerprint=1,
                input_hashes=keys[: len(ids)],
            )
            stored += len(ids)
        generator = torch.Generator().manual_seed(0)  # not the user's
        shuffled = torch.randperm(stored, generator=generator)
        order = [shuffled[at : at + rows] for at in range(0, stored, rows)]
        until = time.perf_counter() + _DISK_SECONDS
        for number, ids in enumerate(order):
            for ahead in order[number : number + _BATCHES_AHEAD]:
                cache.prefetch(ahead.tolist())
            cache.fetch(ids, chain=[0, 1], input_hashes=keys[: len(ids)])
            if time.perf_counter() > until:
                break
        moved = cache.disk_traffic
    finally:
        cache.close()
    if not moved.read_bytes or not moved.written_bytes:
        _LOG.warning("cache: its disk gave nothing back: not used")
        return None
    return TierRates(
        bytes_per_s=_rate(moved.read_bytes, moved.read_ns),
        record_ns=0,
        write_bytes_per_s=_rate(moved.written_bytes, moved.write_ns),
        write_record_ns=0,
        overlap=1.0,
    )


def _rate(size: int, ns: int) -> int:
    return max(1, round(size * _NANOSECONDS / max(ns, 1)))


def _bytes_per_s(size: int, narrow: float, wide: float) -> int:
    return max(1, round(size / max(wide - narrow, _LEAST_BYTES_SHARE * wide)))


def _row_seconds(
    width: int, rows: int, num_samples: int, device: torch.device
) -> tuple[float, float]:
    """Return what a read, to a device, and a write of a record takes, in seconds."""
    count = min(num_samples, _MOST_ROWS, max(2, _MOST_BYTES // width))
    rows = min(rows, count)
    source = torch.zeros(rows, width, dtype=torch.uint8)
    slot = record_bytes([source])
    cache = ActivationCache.create(
        run_id="rates",
        num_samples=count,
        slot_bytes=slot,
        budget_bytes=(count + 1) * (slot + 1024) + (1 << 20),
    )
    keys = torch.zeros(count, dtype=torch.int64)
    try:
        began = time.perf_counter()
        for first in range(0, count, rows):
            ids = torch.arange(first, min(first + rows, count))
            cache.store(
                ids,
                (source[: len(ids)],),
                boundary=1,
                fingerprint=1,
                input_hashes=keys[: len(ids)],
            )
        write = (time.perf_counter() - began) / count
        reads: list[float] = []
        generator = torch.Generator().manual_seed(0)  # not the user's
        until = time.perf_counter() + _SECONDS
        while not reads or time.perf_counter() < until:
            ids = torch.randint(0, count, (rows,), generator=generator)
            began = time.perf_counter()
            found = cache.fetch(ids, chain=[0, 1], input_hashes=keys[:rows])
            _wait_for([records.to(device) for records in found], device)
            reads.append((time.perf_counter() - began) / rows)
            del found  # as a step does before the next one
    finally:
        cache.close()
    return sorted(reads)[len(reads) // 2], write


def _hash_seconds(inputs: Sequence[Tensor]) -> float:
    """Return what hashing a row takes, the faster of two runs."""
    if not inputs:
        return 0.0
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        hash_rows(*inputs)
        taken.append(time.perf_counter() - began)
    return min(taken) / len(inputs[0])
