"""Worker threads, one per device slot, shared by everything that uses the slots."""

from __future__ import annotations

import atexit
import types
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipetransformer import _C

SpareRun = _C.pipe.SpareRun
T = TypeVar("T")
R = TypeVar("R")

# A thread that still has Python state when the interpreter goes would abort it.
atexit.register(_C.pipe.shutdown_all_pools)


class Workers:
    """One C++ worker thread per device slot.

    A worker computes with a fixed number of intra-op threads, so K CPU stages use
    K slots. The threads end on `close()`, or when neither this object nor a graph
    whose backward needs them is left. In a forked child (a DataLoader worker) the
    object does nothing and ends nothing.

    Args:
        num_workers: Number of slots, at least 1.
        intra_op_threads: Threads each worker computes with, at least 1.

    Raises:
        ValueError: if a number is below 1.
    """

    def __init__(self, num_workers: int, *, intra_op_threads: int = 1) -> None:
        self._pool = _C.pipe.WorkerPool(num_workers, intra_op_threads)
        self.num_workers = num_workers
        self.intra_op_threads = intra_op_threads

    @property
    def pool(self) -> _C.pipe.WorkerPool:
        """The C++ pool, for the executor."""
        return self._pool

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call ``fn`` on every item, item i on worker ``i % num_workers``.

        The calls run in the caller's context: grad mode, inference mode, autocast.
        With one worker they run in the calling thread.

        Args:
            fn: Function of one item; called from several threads at a time.
            items: The items.

        Returns:
            The results, in the order of the items.

        Raises:
            BaseException: the failure with the lowest index, as it was raised, once
                all running calls have ended; later calls are left out.
            RuntimeError: if the workers are closed, or when called on one of them.
        """
        if self.num_workers == 1:
            return [fn(item) for item in items]
        return self._pool.map(fn, list(items))

    def spare(self, function: Callable[[T], bool], items: Sequence[T]) -> SpareRun:
        """Let workers that have nothing else to do call ``function`` on every item.

        A call is made again as long as it returns True, each time on any worker: so
        long work is cut into short parts, and a cell that gets ready waits for no more
        than one. Workers take parts when they have no cell or call of `map`, and while
        a cell waits for another one. The calls run in the context of this call: grad
        mode, inference mode, autocast. A trace shows them by worker.

        Args:
            function: Function of one item; called from several threads at a time, but
                not with one item at the same time.
            items: The items; the parts of earlier ones begin first.

        Returns:
            The handle: ``wait()`` waits for all of it, and raises the failure of the
            lowest item; ``cancel()`` lets what runs end and starts no more. One of
            them is to be called before what the parts use is changed.

        Raises:
            RuntimeError: if the workers are closed.
        """
        return self._pool.spare(function, list(items))

    def drain(self, *, timeout_s: float = 30.0) -> None:
        """Wait until every cell and call of `map` that was submitted before is over.

        A backward that raises elsewhere, as in a hook, leaves its cells running: drain
        before touching what they use. Closed workers have nothing left to wait for.

        Args:
            timeout_s: Longest wait in seconds; positive.

        Raises:
            ValueError: if ``timeout_s`` is not positive.
            TimeoutError: if something still runs after ``timeout_s`` seconds.
            RuntimeError: when called on a worker.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected a positive time, got {timeout_s}")
        if not self._pool.drain(timeout_s):
            raise TimeoutError(
                f"workers: expected to be done within {timeout_s} s, got cells or "
                "calls still running"
            )

    def cpu_seconds(self) -> list[float]:
        """Return the processor seconds that each worker has used so far.

        What a worker waits is not in it, nor what other intra-op threads compute for
        it. Empty once the workers are closed.
        """
        return self._pool.cpu_seconds()

    def close(self) -> None:
        """Run what is queued, spare parts too, then end the threads.

        May be called again.

        Raises:
            RuntimeError: when called on one of them.
        """
        self._pool.shutdown()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()
