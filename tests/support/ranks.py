"""Runs one function in several processes and brings results or tracebacks back."""

import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _child(fn, rank, world_size, port, args, results, dump_path, dump_after_s):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    with open(dump_path, "w") as dump:
        faulthandler.dump_traceback_later(dump_after_s, file=dump)
        import torch

        torch.set_num_threads(1)
        try:
            # As bytes: the queue would send tensors as descriptors of this process.
            results.put((rank, True, pickle.dumps(fn(rank, *args))))
        except BaseException:
            results.put((rank, False, pickle.dumps(traceback.format_exc())))
        finally:
            faulthandler.cancel_dump_traceback_later()


class Ranks:
    """Processes that run ``fn(rank, *args)`` under torchrun's variables.

    ``join()`` returns the results by rank and raises with the child's traceback,
    or with every stack on a timeout. ``processes`` gives access for kills.
    """

    def __init__(self, fn, world_size, *args, timeout_s=60.0):
        context = multiprocessing.get_context("spawn")
        self._results = context.Queue()
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._deadline = time.monotonic() + timeout_s
        port = free_port()
        self.processes = []
        for rank in range(world_size):
            dump = os.path.join(self._folder.name, str(rank))
            process = context.Process(
                target=_child,
                args=(
                    fn,
                    rank,
                    world_size,
                    port,
                    args,
                    self._results,
                    dump,
                    max(1.0, timeout_s - 3.0),
                ),
                daemon=True,
            )
            process.start()
            self.processes.append(process)

    def outcomes(self, expected=None):
        """Collect ``{rank: (ok, value or traceback)}`` from `expected` ranks."""
        expected = set(range(len(self.processes)) if expected is None else expected)
        outcomes = {}
        while expected - set(outcomes):
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(
                    f"ranks {sorted(expected - set(outcomes))} gave no result in "
                    f"{self._timeout_s} s\n{self._stacks()}"
                )
            try:
                rank, ok, value = self._results.get(timeout=min(left, 0.5))
            except Exception as error:
                if type(error).__name__ != "Empty":
                    raise
                gone = [
                    r
                    for r in expected - set(outcomes)
                    if self.processes[r].exitcode is not None
                ]
                if gone and self._results.empty():
                    time.sleep(0.2)
                    if self._results.empty():
                        codes = {r: self.processes[r].exitcode for r in gone}
                        raise AssertionError(
                            f"ranks died without a result: {codes}"
                        ) from None
                continue
            outcomes[rank] = (ok, pickle.loads(value))
        return outcomes

    def join(self):
        try:
            outcomes = self.outcomes()
            for rank, (ok, value) in sorted(outcomes.items()):
                assert ok, f"rank {rank} failed:\n{value}"
            return [outcomes[rank][1] for rank in range(len(self.processes))]
        finally:
            self.close()

    def close(self):
        for process in self.processes:
            process.join(timeout=max(0.1, min(10.0, self._deadline - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _stacks(self):
        parts = []
        for rank in range(len(self.processes)):
            path = os.path.join(self._folder.name, str(rank))
            if os.path.exists(path):
                with open(path) as file:
                    parts.append(f"--- rank {rank}\n{file.read()}")
        return "\n".join(parts)


def run_ranks(fn, world_size, *args, timeout_s=60.0):
    """Run ``fn(rank, *args)`` in `world_size` processes; return results by rank."""
    return Ranks(fn, world_size, *args, timeout_s=timeout_s).join()
