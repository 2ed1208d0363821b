"""Worker threads, one per device slot, shared by everything that uses the slots."""

from __future__ import annotations

import atexit
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipetransformer.pipe._binding import WorkerPool

T = TypeVar("T")
R = TypeVar("R")

_open_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that still runs Python when the interpreter goes would hang in it.
    for workers in list(_open_workers):
        workers.close()


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
        self._pool = WorkerPool(num_workers, intra_op_threads)
        self.num_workers = num_workers
        self.intra_op_threads = intra_op_threads
        _open_workers.add(self)

    @property
    def pool(self) -> WorkerPool:
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

    def close(self) -> None:
        """Run what is queued, then end the threads; may be called again."""
        self._pool.shutdown()
        _open_workers.discard(self)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()
