"""Reads and writes of the activation cache against copies of the same bytes.

python benchmarks/cache_bandwidth.py --json benchmarks/results/cache_bandwidth.json

A batch is 32 samples in random order out of a slab that is larger than the caches of
the processor. ``copy`` is ``clone()`` of as many bytes in one piece, from a random
place of a tensor as large as the slab; ``index_select`` gathers the same rows from that
tensor. All allocate their result. ``checked`` compares the checksum of every record
instead of one in 64; ``ragged`` reads records of half to full length, padded to the
full one, and counts the bytes of the result. ``store`` writes over records that are
there. ``int8 read``, ``int8 store`` and so on go through a codec; their rates count the
decoded bytes. The systems of a row size run in turn. Rates are GB/s, ratios over
``copy``.

``disk`` reads batches of a cache that has no room in memory, each asked for three
batches before, past the page cache (O_DIRECT). Its ratio is over ``raw``: as many
random reads of the same file and size by a plain program, ``direct_reads.cpp``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cache_disk import DiskBench
from harness.common import (
    Repeat,
    Row,
    Target,
    add_common_arguments,
    begin,
    interleave,
    measured,
    ratio,
    write_json,
)
from harness.text import text_table
from pipetransformer.autocache import ActivationCache, Codec, Ragged, usual_bytes

BATCH = 32
LEAST = 0.6  # of a copy's rate, for reads
COPY = "copy"
LEAST_OF_DISK = 0.8  # of a plain program's rate
RAW = "raw"
ON_DISK = ("37 KB", "75 KB", "302 KB")
# Positions of 384 and 768 values of 4 bytes; records of an image and of a sentence.
WIDTHS = {
    "4 KB": (1, 1024),
    "37 KB": (24, 384),
    "75 KB": (49, 384),
    "302 KB": (98, 768),
}
RAGGED = Ragged(lambda inputs: inputs)
CODECS: tuple[Codec, ...] = ("bf16", "fp16", "int8")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=9)
    add = parser.add_argument
    add("--slab-mb", type=int, default=512)
    add("--batch-mb", type=int, default=1000, help="read by one repeat")
    add("--threads", type=int, nargs="+", default=[1, 2])
    add("--rows", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    add("--disk", default=tempfile.gettempdir(), help="folder of the disk rows")
    add("--disk-mb", type=int, default=2000)
    add("--disk-read-mb", type=int, default=2000, help="read by one repeat")
    args = parser.parse_args(arguments)
    if args.quick:
        args.repeats, args.slab_mb, args.batch_mb = 1, 16, 16
        args.disk_mb, args.disk_read_mb = 64, 64
    return args


class Bench:
    """A slab, a ragged one, and a tensor, all of the same rows.

    Args:
        shape: Of a row: positions and width.
        slab_bytes: Of all rows together.
    """

    def __init__(self, shape: tuple[int, int], slab_bytes: int) -> None:
        self.row_bytes = 4 * shape[0] * shape[1]
        self._rows = max(2 * BATCH, slab_bytes // self.row_bytes)
        self._shape = shape
        self._source = torch.randn(self._rows, *shape)
        self._lengths = torch.randint((shape[0] + 1) // 2, shape[0] + 1, (self._rows,))
        self._cache = self._made(verify="sampled")
        self._checked = ActivationCache.attach(
            self._cache.address, run_id="bench", verify="all"
        )
        self._ragged = self._made(ragged=True)
        self._encoded = {codec: self._made(codec, ragged=True) for codec in CODECS}
        self._turn = 1
        for begin_row in range(0, self._rows, BATCH):
            ids = torch.arange(begin_row, min(begin_row + BATCH, self._rows))
            self._store(self._cache, "native", ids)
            for codec, cache in self._encoded.items():
                self._store(cache, codec, ids)
            self._ragged.store(
                ids,
                (self._source[ids],),
                boundary=1,
                fingerprint=1,
                ragged=RAGGED,
                lengths=self._lengths[ids],
            )

    def _made(self, codec: Codec = "native", **options: object) -> ActivationCache:
        usual = usual_bytes(self.row_bytes, codec)
        return ActivationCache.create(
            run_id="bench",
            num_samples=self._rows,
            slot_bytes=usual + 512,
            budget_bytes=(self._rows + 1) * (usual + 1024),
            **options,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Release all memory."""
        for cache in (
            self._cache,
            self._checked,
            self._ragged,
            *self._encoded.values(),
        ):
            cache.close()

    def systems(self) -> dict[str, Callable[[Tensor], object]]:
        """Return what is done with a batch of ids, by name."""
        systems: dict[str, Callable[[Tensor], object]] = {
            COPY: self._copy,
            "index_select": functools.partial(torch.index_select, self._source, 0),
            "read": functools.partial(self._read, self._cache, "native"),
            "checked read": functools.partial(self._read, self._checked, "native"),
            "ragged read": self._read_ragged,
            "store": functools.partial(self._store_again, self._cache, "native"),
        }
        for codec, cache in self._encoded.items():
            if self._shape[0] > 1 or codec != "int8":  # which needs several tokens
                read = functools.partial(self._read, cache, codec)
                store = functools.partial(self._store_again, cache, codec)
                systems |= {f"{codec} read": read, f"{codec} store": store}
        return systems

    def batches(self, count: int) -> list[Tensor]:
        """Return ids of batches, drawn without replacement within each."""
        return [torch.randperm(self._rows)[:BATCH] for _ in range(count)]

    def _copy(self, ids: Tensor) -> Tensor:
        first = min(int(ids[0]), self._rows - BATCH)
        return self._source[first : first + BATCH].clone()

    def _read(self, cache: ActivationCache, codec: Codec, ids: Tensor) -> None:
        (found,) = cache.fetch(ids, chain=[0, self._turn], codec=codec)
        if len(found.rows) != BATCH:
            raise RuntimeError(f"expected {BATCH} hits, got {len(found.rows)}")

    def _read_ragged(self, ids: Tensor) -> None:
        (found,) = self._ragged.fetch(
            ids, chain=[0, 1], ragged=RAGGED, length=self._shape[0]
        )
        if len(found.rows) != BATCH:
            raise RuntimeError(f"expected {BATCH} hits, got {len(found.rows)}")

    def _store(self, cache: ActivationCache, codec: Codec, ids: Tensor) -> None:
        cache.store(
            ids,
            (self._source[: len(ids)],),
            boundary=1,
            fingerprint=self._turn,
            codec=codec,
        )

    def _store_again(self, cache: ActivationCache, codec: Codec, ids: Tensor) -> None:
        # A new fingerprint each time; put back, so that reads find them all.
        cache.store(
            ids,
            (self._source[:BATCH],),
            boundary=2,
            fingerprint=int(ids[0]),
            codec=codec,
        )
        self._store(cache, codec, ids)


def measure(
    args: argparse.Namespace, row: str, threads: int
) -> tuple[list[Row], list[Row]]:
    """Return rates of all systems for rows of a size, and those over ``copy``."""
    bench = Bench(WIDTHS[row], args.slab_mb * 2**20)
    systems = bench.systems()
    batch_bytes = BATCH * bench.row_bytes
    batches = bench.batches(max(1, args.batch_mb * 10**6 // batch_bytes))
    torch.set_num_threads(threads)

    def run(name: str, _: int) -> Repeat:
        work = systems[name]
        written = 2 if name.endswith("store") else 1  # two records for each row

        def all_batches() -> None:
            for ids in batches:
                work(ids)

        sample = measured(all_batches)
        rate = written * len(batches) * batch_bytes / sample.wall_s / 1e9
        return Repeat(sample, {"rate": rate})

    series = interleave(list(systems), run, repeats=args.repeats)
    bench.close()
    rates = {name: each.row("rate", "GB/s") for name, each in series.items()}
    named = [
        dataclasses.replace(each, system=f"{row}, {threads} thread(s), {name}")
        for name, each in rates.items()
    ]
    return named, [rates[name] for name in systems]


def measure_disk(args: argparse.Namespace, row: str) -> list[Row]:
    """Return rates of the disk tier and of raw reads, in this order."""
    bench = DiskBench(WIDTHS[row], args.disk_mb * 10**6, args.disk, BATCH)
    batch_bytes = BATCH * bench.row_bytes
    batches = bench.batches(max(1, args.disk_read_mb * 10**6 // batch_bytes))
    all_bytes = len(batches) * batch_bytes
    torch.set_num_threads(1)

    def run(name: str, turn: int) -> Repeat:
        raw_s = []

        def raw() -> None:
            raw_s.append(bench.read_raw(len(batches) * BATCH, args.seed + turn))

        if name == RAW:
            sample = measured(raw)
            return Repeat(sample, {"rate": all_bytes / raw_s[0] / 1e9})
        sample = measured(lambda: bench.read(batches))
        return Repeat(sample, {"rate": all_bytes / sample.wall_s / 1e9})

    series = interleave(["disk", RAW], run, repeats=args.repeats)
    bench.close()
    return [each.row("rate", "GB/s") for each in series.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    torch.manual_seed(args.seed)
    rows, ratios, lines = [], [], []
    for row in args.rows:
        for threads in args.threads:
            named, rates = measure(args, row, threads)
            rows += named
            copy = rates[0]
            for whole, each in zip(named[1:], rates[1:], strict=True):
                reads = each.system in ("read", "ragged read")
                found = ratio(
                    f"{whole.system} / copy",
                    each,
                    copy,
                    better_than=COPY,
                    quick=args.quick,
                    target=Target(LEAST, at_least=True, of="value") if reads else None,
                )
                ratios.append(found)
                told = f"{found.value:.2f} ({found.min:.2f} to {found.max:.2f})"
                missed = reads and found.value < LEAST
                lines.append(
                    [row, str(threads), each.system, told, "missed" if missed else ""]
                )
    for row in [row for row in args.rows if row in ON_DISK]:
        disk, raw = measure_disk(args, row)
        rows += [
            dataclasses.replace(each, system=f"{row}, {each.system}")
            for each in (disk, raw)
        ]
        found = ratio(
            f"{row}, disk / raw",
            disk,
            raw,
            better_than=RAW,
            quick=args.quick,
            target=Target(LEAST_OF_DISK, at_least=True, of="value"),
        )
        ratios.append(found)
        told = f"{found.value:.2f} ({found.min:.2f} to {found.max:.2f})"
        short = "missed" if found.value < LEAST_OF_DISK else ""
        lines.append(
            [row, "1", "disk", f"{told} of raw, {disk.median:.2f} GB/s", short]
        )
    aims = f"aim {LEAST} for reads, {LEAST_OF_DISK} of raw"
    header = ["row", "threads", "system", "of a copy's rate", aims]
    print(text_table(header, lines))
    if args.json is not None:
        write_json(
            args.json,
            "cache_bandwidth",
            rows,
            ratios,
            start=start,
            quick=args.quick,
            batch=BATCH,
            slab_mb=args.slab_mb,
            disk_mb=args.disk_mb,
            seed=args.seed,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
