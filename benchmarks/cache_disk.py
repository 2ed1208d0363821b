"""The cache's disk tier and raw reads of the same file, for ``cache_bandwidth.py``."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import torch
from torch import Tensor

from pipetransformer.autocache import ActivationCache, bytes_on_disk

SOURCE = pathlib.Path(__file__).with_name("direct_reads.cpp")
AHEAD = 3  # batches, as in a pass


class DiskBench:
    """A cache all of whose records but one are on disk.

    Args:
        shape: Of a row: positions and width.
        total_bytes: Of all rows together.
        folder: Where the file is made.
        batch: Rows of a batch.

    Raises:
        RuntimeError: the file system does not grant reads past the page cache.
    """

    def __init__(
        self, shape: tuple[int, int], total_bytes: int, folder: str, batch: int
    ) -> None:
        self.row_bytes = 4 * shape[0] * shape[1]
        self._batch = batch
        self._rows = max(8 * batch, total_bytes // self.row_bytes)
        slot_bytes = self.row_bytes + 512
        self._cache = ActivationCache.create(
            run_id="bench",
            num_samples=self._rows,
            slot_bytes=slot_bytes,
            budget_bytes=4096 + 64 * (self._rows // 8 + 1) + slot_bytes + 64,
        )
        self._cache.add_disk(folder, patience_s=60)
        self._extent_bytes = bytes_on_disk(slot_bytes)
        source = torch.randn(batch, *shape)
        for begin_row in range(0, self._rows, batch):
            ids = torch.arange(begin_row, min(begin_row + batch, self._rows))
            self._cache.store(ids, (source[: len(ids)],), boundary=1, fingerprint=1)
        if self._cache.counters.stored != self._rows:
            raise RuntimeError(
                f"expected {self._rows} rows, got {self._cache.counters}"
            )
        _, file = json.loads(self._cache.address)["disk"]
        with open(f"/proc/self/fdinfo/{file}") as info:
            flags = next(int(line.split()[1], 8) for line in info if "flags" in line)
        if not flags & os.O_DIRECT:
            raise RuntimeError(f"{folder}: expected a file system with O_DIRECT")
        self._file = f"/proc/{os.getpid()}/fd/{file}"
        self._build = tempfile.TemporaryDirectory()
        self._program = build_reader(pathlib.Path(self._build.name))

    def close(self) -> None:
        """Release memory and disk."""
        self._cache.close()
        self._build.cleanup()

    def batches(self, count: int) -> list[Tensor]:
        """Return ids of batches, drawn without replacement within each."""
        return [torch.randperm(self._rows)[: self._batch] for _ in range(count)]

    def read(self, batches: list[Tensor]) -> None:
        """Read batches as a pass does: asked for ahead, then fetched."""
        lists = [ids.tolist() for ids in batches]
        for asked in lists[:AHEAD]:
            self._cache.prefetch(asked)
        for number, ids in enumerate(batches, AHEAD):
            if number < len(lists):
                self._cache.prefetch(lists[number])
            (found,) = self._cache.fetch(ids, chain=[0, 1])
            if len(found.rows) != self._batch:
                raise RuntimeError(
                    f"expected {self._batch} hits, got {len(found.rows)}"
                )

    def read_raw(self, num_rows: int, seed: int) -> float:
        """Return the seconds that a plain program takes for as many records."""
        run = subprocess.run(
            [
                self._program,
                self._file,
                str(self._extent_bytes),
                str(self._rows - 1),
                str(num_rows),
                str(seed),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        return float(run.stdout)


def build_reader(folder: pathlib.Path) -> str:
    """Compile the plain program, with io_uring where it is installed."""
    compiler = shutil.which("g++") or shutil.which("c++") or "c++"
    program = str(folder / "direct_reads")
    command = [compiler, "-std=c++20", "-O2", "-pthread", str(SOURCE), "-o", program]
    uring = [*command, "-DWITH_LIBURING", "-luring"]
    if subprocess.run(uring, check=False, capture_output=True).returncode != 0:
        subprocess.run(command, check=True)
    return program
