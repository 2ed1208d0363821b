"""The cache of a node: records by sample id in memory that its processes share."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pipetransformer import _C
from pipetransformer.autocache.codec import (
    Codec,
    encoded_where_it_is,
    is_lossy,
    on_device,
)
from pipetransformer.autocache.device_tier import DeviceTier, Version
from pipetransformer.autocache.ragged import Ragged, RaggedRows, dims_of, flags, moved
from pipetransformer.autocache.records import Records, joined
from pipetransformer.autocache.sizes import bytes_on_disk
from pipetransformer.core.devices import HOST

_logger = logging.getLogger(__name__)

Verify = Literal["sampled", "all"]
DiskIo = Literal["any", "io_uring", "threads"]

_DISK_PATIENCE_S = 0.1

# It comes from the store, so it may be anything.
_ADDRESS = re.compile(
    rb'\{"pid": (?P<pid>[0-9]{1,10}), "fd": (?P<fd>[0-9]{1,10})'
    rb'(?:, "disk": \[(?P<index>[0-9]{1,10}), (?P<file>[0-9]{1,10})\])?\}'
)


@dataclass(frozen=True)
class CacheCounters:
    """Rows seen by one process since it opened the cache.

    ``hits + misses`` are the rows asked for, ``stored + skipped + full`` the rows
    given to store.

    Attributes:
        hits: rows found.
        misses: rows not found.
        stale: misses whose record is of another prefix or codec, or was overwritten
            while it was read.
        changed: misses whose record is of another input.
        corrupt: misses whose record failed its checksum; it is dropped.
        stored: rows written.
        skipped: rows there already, or just being written by another process.
        full: rows without a slot: none left, or the record is larger than one; and
            without room on disk.
        audited: hits that were computed again, see `ActivationCache.audit_due` and
            `ActivationCache.note_audited`.
        disk_hits: of the hits, those that were on disk.
        device_hits: of the hits, those that were on the device.
        late: misses whose record is on disk and was not read in time, or with an
            error.
    """

    hits: int
    misses: int
    stale: int
    changed: int
    corrupt: int
    stored: int
    skipped: int
    full: int
    audited: int = 0
    disk_hits: int = 0
    late: int = 0
    device_hits: int = 0


@dataclass(frozen=True)
class DiskTraffic:
    """What one process has moved from and to the disk since it opened the cache.

    Attributes:
        read_bytes: that have arrived; whole blocks.
        read_ns: in which at least one read was under way.
        wait_ns: of `ActivationCache.fetch` for reads.
        written_bytes: as `read_bytes`.
        write_ns: as `read_ns`; `ActivationCache.store` waits for its writes.
    """

    read_bytes: int = 0
    read_ns: int = 0
    wait_ns: int = 0
    written_bytes: int = 0
    write_ns: int = 0


class ActivationCache:
    """Records of one id space, shared by the processes of a node.

    Make one with `create` or `attach`. Methods may be called from several threads.
    The cache is disposable: whatever is doubtful about a record makes a miss, is
    counted, and warned about once. The memory is anonymous; it goes with the last
    process that has the cache open, however that process ends. A forked child may
    use, close or drop its copy without harm to the parent, but finds nothing on disk.

    Attributes:
        views: Versions of each sample, with a record each; see `record_ids`.
        given_up: Why this process uses the cache no more; None: it does.
    """

    def __init__(
        self,
        store: _C.autocache.ActivationStore,
        audit_every: int = 0,
        views: int = 1,
        *,
        run_id: str,
        least_disk_bytes: int = 0,
    ) -> None:
        """Wrap an open store; use `create` or `attach` instead."""
        self._store = store
        self.views = views
        self._run_id = run_id
        self._least_disk_bytes = least_disk_bytes  # of a record's place on disk
        self._has_disk = False
        self._folder = ""
        self._device: DeviceTier | None = None
        self._device_hits = 0
        self._warned: set[str] = set()
        self._audit_every = audit_every
        self._audited = 0
        self._hits = 0  # when asked last whether an audit is due
        self._pass_began = self.counters
        self._was_stale = False  # some records, in the pass before
        self._was_changed = False  # most inputs, in the pass before
        self._passes_of_others = 0  # left, that may meet records of a run before
        self.given_up: str | None = None

    @classmethod
    def create(
        cls,
        *,
        run_id: str,
        num_samples: int,
        slot_bytes: int,
        budget_bytes: int,
        ragged: bool = False,
        verify: Verify = "sampled",
        audit_every: int = 0,
        views: int = 1,
    ) -> ActivationCache:
        """Reserve the memory of a new cache.

        Args:
            run_id: names the run; processes of another run cannot attach.
            num_samples: how many there are, each in `views` views.
            slot_bytes: bytes of the largest record, with `ragged` of a usual one,
                see `record_bytes`.
            budget_bytes: of the whole cache. When it holds fewer slots than there
                are records, those that come first keep theirs.
            ragged: records differ in size and take only what they need; memory is
                reserved as they are stored.
            verify: compare checksums on 1/64 of the reads or on all.
            audit_every: one hit in that many is to be audited; 0: none.
            views: versions of each sample.

        Raises:
            ValueError: if an argument is out of range or no slot fits the budget.
            OSError: if the memory cannot be had.
        """
        sizes = {
            "num_samples": num_samples,
            "slot_bytes": slot_bytes,
            "budget_bytes": budget_bytes,
            "views": views,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {value}")
        return cls(
            _C.autocache.ActivationStore.create(
                run_id,
                num_samples * views,
                slot_bytes,
                budget_bytes,
                ragged,
                _verifies_all(verify),
            ),
            audit_every,
            views,
            run_id=run_id,
            # As in memory, where only ragged records differ in size.
            least_disk_bytes=0 if ragged else slot_bytes,
        )

    @classmethod
    def attach(
        cls,
        address: bytes,
        *,
        run_id: str,
        verify: Verify = "sampled",
        audit_every: int = 0,
        views: int = 1,
        disk_patience_s: float = _DISK_PATIENCE_S,
        disk_io: DiskIo = "any",
    ) -> ActivationCache:
        """Open the cache of another process of this node and user.

        Args:
            address: `address` of that process's cache, which it holds open. May come
                from anywhere: sealed memory of this user alone is opened.
            run_id: as given to `create`.
            verify: compare checksums on 1/64 of this process's reads or on all.
            audit_every: one hit of this process in that many is to be audited.
            views: as given to `create`.
            disk_patience_s: see `add_disk`; of this process.
            disk_io: see `add_disk`; of this process.

        Raises:
            ValueError: if there is no cache of this run and format at the address.
                The caller then makes its own.
        """
        verifies_all = _verifies_all(verify)
        place = _ADDRESS.fullmatch(address)
        if place is None:
            raise ValueError(
                "address: expected one made by ActivationCache, got "
                f"{address[:64]!r} ({len(address)} bytes)"
            )
        path = f"/proc/{int(place['pid'])}/fd/{int(place['fd'])}"
        try:
            store = _C.autocache.ActivationStore.attach(path, run_id, verifies_all)
        except OSError as error:
            raise ValueError(
                "address: expected a cache held by a process of this node and user, "
                f"got {error}"
            ) from error
        cache = cls(store, audit_every, views, run_id=run_id)
        if place["index"] is not None:
            folder = f"/proc/{int(place['pid'])}/fd"
            try:
                store.attach_disk(
                    run_id=run_id,
                    index_path=f"{folder}/{int(place['index'])}",
                    file_path=f"{folder}/{int(place['file'])}",
                    patience_ms=round(1000 * disk_patience_s),
                    io=disk_io,
                )
                cache._has_disk = True
            except (OSError, ValueError) as error:
                _logger.warning("cache: nothing on disk for this process: %s", error)
        return cache

    def add_disk(
        self,
        directory: str | os.PathLike[str],
        *,
        disk_bytes: int | None = None,
        patience_s: float = _DISK_PATIENCE_S,
        io: DiskIo = "any",
    ) -> None:
        """Keep on disk what the memory has no room for; before others attach.

        The file has no name: it goes with the last process that has it open.

        Args:
            directory: where it is made.
            disk_bytes: its size, at most; None: half of what is free there. It takes
                no more than records of all samples do.
            patience_s: how long to wait for the records of a batch, and as long again
                as they take at 100 MB/s. What is late then is a miss.
            io: what moves the bytes; "any": io_uring where the system lets it, else
                threads.

        Raises:
            ValueError: if no record fits `disk_bytes`, or the cache is closed.
            OSError: if there cannot be such a file.
        """
        folder = os.fspath(directory)
        if disk_bytes is None:
            disk_bytes = shutil.disk_usage(folder).free // 2
        all_bytes = self._store.num_samples * bytes_on_disk(self.slot_bytes)
        self._store.create_disk(
            run_id=self._run_id,
            directory=folder,
            bytes=min(disk_bytes, all_bytes),
            least_bytes=self._least_disk_bytes,
            patience_ms=round(1000 * patience_s),
            io=io,
        )
        self._has_disk = True
        self._folder = folder

    def use_device(
        self, device: torch.device, budget_bytes: int, *, sharers: int = 1
    ) -> None:
        """Keep copies of records on a device, for this process alone, from here on.

        Copies that there were are dropped: they are made again as records are read,
        from the records, which stay. Call `fetch` from one thread then.

        Args:
            device: where records are used.
            budget_bytes: memory of all copies; 0: there are none.
            sharers: processes that share the samples, and ask for much the same ones
                in each pass.
        """
        self._device = None
        if budget_bytes > 0:
            records = self._store.num_samples
            # Some samples come to another process now and then.
            expected = records if sharers == 1 else -(-records * 5 // (4 * sharers))
            self._device = DeviceTier(device, budget_bytes, records, expected)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that this process has taken for copies of records."""
        return 0 if self._device is None else self._device.bytes

    @property
    def address(self) -> bytes:
        """Where other processes of the node can attach while this one lives."""
        disk, facts = b"", self._store.disk()
        if facts is not None:
            disk = b', "disk": [%d, %d]' % (facts.descriptor, facts.file_descriptor)
        return b'{"pid": %d, "fd": %d%s}' % (os.getpid(), self._store.descriptor, disk)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self._store.num_samples // self.views

    @property
    def num_slots(self) -> int:
        """Number of records of `slot_bytes` that there is room for at once."""
        return self._store.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, of a ragged cache of a usual one, rounded up."""
        return self._store.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots taken so far, by all processes."""
        return self._store.used_bytes

    @property
    def disk_used_bytes(self) -> int:
        """Bytes of all places on disk taken so far, by all processes."""
        facts = self._store.disk()
        return 0 if facts is None else facts.used_bytes

    @property
    def disk_records(self) -> int:
        """Number of records of `slot_bytes` that there is room for on disk at once."""
        facts = self._store.disk()
        if facts is None:
            return 0
        most = facts.file_bytes // bytes_on_disk(self.slot_bytes)
        return min(self._store.num_samples, most)

    @property
    def disk_text(self) -> str:
        """What there is on disk, for people."""
        facts = self._store.disk()
        if facts is None:
            return "nothing on disk"
        way = "past" if facts.direct else "through"
        size = facts.file_bytes / 1e6
        return f"{size:.0f} MB on disk in {self._folder}, {way} the page cache"

    @property
    def has_disk(self) -> bool:
        """Whether this process keeps records on disk, too."""
        return self._has_disk

    @property
    def counters(self) -> CacheCounters:
        """Counts of this process so far; also after `close`."""
        counts = self._store.counts()
        return CacheCounters(
            hits=counts.hits + self._device_hits,
            misses=counts.misses,
            stale=counts.stale,
            changed=counts.changed,
            corrupt=counts.corrupt,
            stored=counts.stored,
            skipped=counts.skipped,
            full=counts.full,
            audited=self._audited,
            disk_hits=counts.disk_hits,
            late=counts.late,
            device_hits=self._device_hits,
        )

    @property
    def disk_traffic(self) -> DiskTraffic:
        """What this process has moved so far; nothing once the cache is closed."""
        facts = self._store.disk()
        if facts is None:
            return DiskTraffic()
        return DiskTraffic(
            read_bytes=facts.read_bytes,
            read_ns=facts.read_ns,
            wait_ns=facts.wait_ns,
            written_bytes=facts.written_bytes,
            write_ns=facts.write_ns,
        )

    def record_ids(self, samples: Tensor, view: int) -> Tensor:
        """Return the ids of the samples' records in a view.

        Args:
            samples: ids in ``0 .. num_samples - 1``, ``(rows,)`` int64.
            view: in ``0 .. views - 1``.
        """
        return samples * self.views + view if self.views > 1 else samples

    def name_of(self, record: int) -> str:
        """Name the sample, and the view if there are several, of a record's id."""
        sample, view = divmod(record, self.views)
        return f"sample {sample}" + (f" in view {view}" if self.views > 1 else "")

    def prefetch(self, samples: Sequence[int], view: int = 0) -> None:
        """Start to read what of these samples is on disk in a view, for `fetch`.

        Ask for one batch after the other, in their order, some batches ahead. What
        does not fit a bounded memory is read when it is fetched. A closed cache
        reads nothing.
        """
        if not self._has_disk:
            return
        records = [each * self.views + view for each in samples]
        if self._device is not None:
            held = self._device.holds(torch.tensor(records, dtype=torch.int64))
            records = [
                each
                for each, here in zip(records, held.tolist(), strict=True)
                if not here
            ]
        self._store.prefetch(records)

    def fetch(
        self,
        ids: Tensor,
        *,
        chain: Sequence[int],
        input_hashes: Tensor | None = None,
        ragged: Ragged | None = None,
        length: int | None = None,
        codec: Codec = "native",
        disk: bool = True,
        device: torch.device = HOST,
    ) -> list[Records]:
        """Read the records of a batch.

        Args:
            ids: of records, ``(rows,)`` int64; duplicates are legal.
            chain: ``fingerprint_chain`` up to the current boundary: a record of
                boundary ``b < len(chain)`` is valid if its fingerprint is ``chain[b]``.
            input_hashes: ``(rows,)`` int64 of the inputs as they are now; a record of
                other inputs, or stored without a hash, is a miss. None: not compared.
            ragged: how ragged records are padded; None: they are misses.
            length: what they are padded to; longer ones are misses. None: to the
                longest of an entry.
            codec: records of this codec, and native ones, are found; the others are
                misses.
            disk: look for records on disk, too.
            device: where they are brought. To another one than the host encoded
                records travel as they are kept, and are decoded there.

        Returns:
            One entry per boundary and layout found, boundaries ascending. Rows in no
            entry are misses.

        Raises:
            ValueError: if an id is out of range, a shape or dtype is wrong, or the
                cache is closed.
        """
        tier = self._device

        def read(rows: Tensor | None = None) -> list[Records]:
            taken, hashes = ids, input_hashes
            if rows is not None:
                taken = ids[rows]
                hashes = None if input_hashes is None else input_hashes[rows]
            return self._read(
                taken, chain, hashes, ragged, length, codec, device, disk=disk
            )

        if tier is None or input_hashes is None:
            return read()
        # Counted before records are read: what is dropped meanwhile is not kept.
        version = Version(chain[-1], codec, self._store.num_clears)
        top = len(chain) - 1
        copies = tier.find(version, top, ids, input_hashes, ragged, length)
        if copies is None:
            found = read()
        else:
            self._device_hits += len(copies.rows)
            absent = torch.ones(len(ids), dtype=torch.bool)
            absent[copies.rows] = False
            rest = absent.nonzero().squeeze(1)
            below = read(rest) if len(rest) else []
            found = [replace(each, rows=rest[each.rows]) for each in below]
        kept = [
            tier.keep(ids, input_hashes, each, ragged) if each.boundary == top else each
            for each in found
        ]
        return kept if copies is None else joined([*kept, copies])

    def _read(
        self,
        ids: Tensor,
        chain: Sequence[int],
        input_hashes: Tensor | None,
        ragged: Ragged | None,
        length: int | None,
        codec: Codec,
        device: torch.device,
        *,
        disk: bool,
    ) -> list[Records]:
        """Read records that other processes may have written."""
        fills = list(ragged.fills) if ragged is not None else []
        groups = self._store.fetch(
            ids,
            list(chain),
            input_hashes,
            fills,
            -1 if length is None else length,
            codec,
            disk,
            device != HOST,
        )
        self._warn_once("corrupt", "records failed their checksum and are recomputed")
        self._warn_once("late", "records were not read from disk in time")
        self._warn_of_disk()
        found = []
        for boundary, rows, lengths, kept, lossy in groups:
            tensors = [on_device(each, lengths, device) for each in kept]
            if ragged is not None and lengths is not None:
                try:
                    dims = dims_of(tensors, ragged.dim)
                except ValueError:
                    continue  # whoever wrote it had another spec
                tensors = moved(tensors, dims, back=True)
            found.append(Records(boundary, rows, tuple(tensors), lengths, lossy))
        return found

    def store(
        self,
        ids: Tensor,
        tensors: Sequence[Tensor],
        *,
        boundary: int,
        fingerprint: int,
        input_hashes: Tensor | None = None,
        ragged: Ragged | None = None,
        lengths: Tensor | None = None,
        codec: Codec = "native",
        disk: bool = True,
    ) -> int:
        """Write records, in place of those that the samples had.

        A record with the same boundary, fingerprint and input hash is left as it is,
        if it is native or of the same codec.

        Args:
            ids: of records, ``(rows,)`` int64; of duplicates the first is stored.
            tensors: all that crosses the boundary, each ``(rows, ...)``.
            boundary: number of layers that the activations have passed.
            fingerprint: ``fingerprint_chain(...)[boundary]``.
            input_hashes: ``(rows,)`` int64 of the inputs.
            ragged: how the tensors are padded; None: they are not.
            lengths: with `ragged`, how many positions of each row are valid,
                ``(rows,)`` int64. Only these are stored.
            codec: how tensors of float32 (``"int8"``: of 16 bits, too) are encoded. A
                row with a value that it cannot hold stays native. What is on a device
                is encoded there.
            disk: write on disk what the memory has no room for.

        Returns:
            Number of rows written.

        Raises:
            ValueError: if an id or the boundary is out of range, a shape or dtype is
                wrong, or the cache is closed. Never because there is no room.
        """
        if boundary < 0:
            raise ValueError(f"boundary: expected a number >= 0, got {boundary}")
        padded = [False] * len(tensors)
        if ragged is not None:
            dims = dims_of(tensors, ragged.dim)
            tensors, padded = moved(tensors, dims), flags(dims)
            lengths = lengths if any(padded) else None
        kept: Sequence[Tensor | _C.autocache.EncodedTensor] = tensors
        if is_lossy(codec) and any(tensor.device != HOST for tensor in tensors):
            kept = [
                encoded_where_it_is(tensor, lengths if is_padded else None, codec)
                for tensor, is_padded in zip(tensors, padded, strict=True)
            ]
            codec = "native"  # of what is left
        written = self._store.store(
            ids,
            kept,
            boundary,
            fingerprint,
            input_hashes,
            padded,
            lengths,
            codec,
            disk,
        )
        self._warn_once("full", "records have no slot and will be recomputed")
        self._warn_of_disk()
        return written

    @property
    def audits(self) -> bool:
        """Whether anything that frozen layers gave is ever computed again."""
        return self._audit_every > 0

    def audit_due(self) -> bool:
        """Tell, and count, whether one of the hits since the last call is due.

        The first hits on records of an earlier run always are. Whoever gets True
        computes one of them again and compares.
        """
        hits, before = self.counters.hits, self._hits
        self._hits = hits
        every = self._audit_every
        first = self._passes_of_others > 0 and before == 0 and hits > 0
        if every == 0 or (hits // every == before // every and not first):
            return False
        self._audited += 1
        return True

    def note_audited(self, hits: int) -> None:
        """Count hits that were computed again although no audit was due."""
        self._audited += hits

    def fail_audit(self, reason: str) -> None:
        """Drop all records, and use the cache no more unless an earlier run made them.

        Other processes then use it no more either, see `heed_others`.

        Args:
            reason: How a record differs from what it should be.
        """
        self.clear()
        if self._passes_of_others:
            self._passes_of_others = 0
            _logger.warning("cache: records of earlier runs are dropped: %s", reason)
        else:
            self._store.give_up()
            self.give_up(reason)

    def heed_others(self) -> None:
        """Give the cache up if an audit has failed in another process."""
        if self._store.given_up:
            self.give_up(
                "a record was found wrong by another process of this node, whose log "
                "says how"
            )

    def begin_pass(self) -> None:
        """Give the cache up if inputs changed and none was found, in two passes.

        One such pass may be the first over another training set. Also if an audit has
        failed in another process.
        """
        self.heed_others()
        now, before = self.counters, self._pass_began
        self._pass_began = now
        asked = now.hits + now.misses - before.hits - before.misses
        if asked and self._passes_of_others:  # whose inputs were what they were
            self._passes_of_others -= 1
            return
        changed = now.changed - before.changed
        stale, again = now.stale > before.stale, self._was_stale
        self._was_stale = stale and not again
        if self._was_stale:
            return  # of samples whose records are of other layers nobody knows yet
        if not asked:
            return
        again = self._was_changed
        self._was_changed = (
            changed > 0 and now.hits == before.hits and 8 * changed >= asked
        )
        if self._was_changed and again:
            self.give_up(
                f"{changed} of {asked} samples have other inputs than in the pass "
                "before, and none the same, for the second time: random augmentation, "
                "another evaluation set without a name of its own (evaluate(..., "
                "name=...)), or padding that ragged=pt.Ragged(...) would tell apart"
            )

    def give_up(self, reason: str) -> None:
        """Ask this process to use the cache no more; say why, once."""
        if self.given_up is None:
            self.given_up = reason
            _logger.warning("cache: used no more: %s", reason)

    def save(
        self,
        descriptor: int,
        begin: int,
        older: tuple[int, int, int] | None = None,
        *,
        incomplete: bool = False,
    ) -> _C.autocache.FileCounts:
        """Write all records to an open file, behind its first `begin` bytes.

        Args:
            descriptor: Of the file.
            begin: Where records begin in it.
            older: Descriptor, first byte and end of another one, whose records of the
                other samples are copied: if it is read at all, see `incomplete`, or if
                records on disk cannot be read in time.
            incomplete: Some of its records had no room here.

        Raises:
            OSError: what the disk reported.
        """
        return self._store.save(descriptor, begin, older, incomplete)

    @property
    def num_clears(self) -> int:
        """How often all records were dropped, by any process."""
        return self._store.num_clears

    def load(self, descriptor: int, begin: int, end: int) -> _C.autocache.FileCounts:
        """Take records of an earlier run for samples that have none here.

        Args:
            descriptor: Of an open file that `save` wrote; it may hold anything.
            begin: First byte of the records.
            end: Byte behind the last one.

        Raises:
            OSError: what the disk reported.
        """
        found = self._store.load(descriptor, begin, end)
        if found.taken > 0:
            self._passes_of_others = self.views
        return found

    def expect_earlier_records(self) -> None:
        """Have the first hit audited if there are records: they may be of a run before.

        For a process that attaches; `load` does so for the one that reads them.
        """
        self._passes_of_others = self.views if self.used_bytes > 0 else 0

    def clear(self) -> None:
        """Drop all records and copies, for all processes.

        Copies of other processes are found no more, and their memory is given back
        with the next batch that is read there.
        """
        if self._device is not None:
            self._device.clear()
        self._store.clear()

    def close(self) -> None:
        """Let go of memory and file; other processes keep them."""
        self._device = None
        self._store.close()

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning, unless one with this key has been logged."""
        if key not in self._warned:
            self._warned.add(key)
            _logger.warning("cache: %s", text)

    def _warn_once(self, counter: str, text: str) -> None:
        if counter not in self._warned:
            rows = getattr(self._store.counts(), counter)
            if rows > 0:
                self.warn_once(counter, f"{rows} {text}; see counters for more")

    def _warn_of_disk(self) -> None:
        facts = self._store.disk() if self._has_disk else None
        if facts is None:
            return
        for what, error in (("read", facts.read_error), ("written", facts.write_error)):
            if error:
                self.warn_once(
                    f"disk {what}",
                    f"nothing more is {what} on disk: {os.strerror(error)}",
                )


def hash_ragged_rows(rows: RaggedRows) -> Tensor:
    """Hash the valid part of each sample, ``(rows,)`` int64: padding does not count."""
    return _C.autocache.hash_rows(rows.tensors, rows.ragged, rows.lengths)


def hash_rows(*tensors: Tensor) -> Tensor:
    """Hash the content of each sample.

    Args:
        tensors: at least one, each ``(rows, ...)``.

    Returns:
        ``(rows,)`` int64: equal for rows with the same dtypes, shapes and bytes.

    Raises:
        ValueError: if there is no tensor or the first dims differ.
    """
    return _C.autocache.hash_rows(list(tensors), [], None)


def _verifies_all(verify: Verify) -> bool:
    if verify not in ("sampled", "all"):
        raise ValueError(f"verify: expected 'sampled' or 'all', got {verify!r}")
    return verify == "all"
