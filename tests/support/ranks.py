"""Runs one function in several processes and brings results or tracebacks back."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from multiprocessing import connection, reduction

from tests.support import fork_server
from tests.support.lifeline import die_with

ENDS_WITHIN_S = 30  # from its result to the end of a process


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Stream:
    """A descriptor of this process for the child: what pytest captures now."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate):
    return duplicate.detach()


def _child(parent, environment, streams, dump_path, dump_after_s, call, results):
    die_with(parent or os.getppid())
    os.setsid()  # a kill reaches what the rank starts, Ctrl-C does not reach the rank
    for number, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    # Neither closed nor cancelled: a process that does not end is dumped as well.
    dump = os.open(dump_path, os.O_WRONLY | os.O_CREAT)
    faulthandler.dump_traceback_later(dump_after_s, file=dump)
    import torch

    torch.set_num_threads(1)
    try:
        # Unpickled here: the test's module may read the environment when imported.
        fn, rank, args = pickle.loads(call)
        # As bytes: a pipe would send tensors as descriptors of this process.
        outcome = pickle.dumps((True, fn(rank, *args)))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc()))
    results.send_bytes(outcome)
    results.close()


def _environment(rank, world_size, port):
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class Ranks:
    """Processes that run ``fn(rank, *args)`` under torchrun's variables.

    ``join()`` returns the results by rank and raises with the child's traceback,
    or with every stack on a timeout. ``kill()`` sends signals. As a context manager
    it ends all processes, stopped ones too.

    The processes are forked from one that has imported torch. `fresh` asks for new
    interpreters: where a test is about the end of a process, the order of hashes or
    a device, or needs to be the parent. Only the main thread makes them.
    """

    def __init__(self, fn, world_size, *args, timeout_s=100.0, fresh=False):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Ranks: expected the main thread, got another")
        if fresh:
            context, parent = multiprocessing.get_context("spawn"), os.getpid()
        else:
            context, parent = fork_server.context(), None
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._deadline = time.monotonic() + timeout_s
        self._received = {}
        self._results = []
        self.processes = []
        port = free_port()
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(
                    parent,
                    _environment(rank, world_size, port),
                    (_Stream(1), _Stream(2)),
                    os.path.join(self._folder.name, str(rank)),
                    max(1.0, timeout_s - 3.0),
                    pickle.dumps((fn, rank, args)),
                    sender,
                ),
                daemon=True,
            )
            process.start()
            sender.close()
            self.processes.append(process)
            self._results.append(receiver)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def kill(self, rank, number=signal.SIGKILL):
        """Send a signal to `rank`, whether it still lives or not."""
        if self.processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def outcomes(self, expected=None):
        """Collect ``{rank: (ok, value or traceback)}`` from `expected` ranks."""
        expected = set(range(len(self.processes)) if expected is None else expected)
        while missing := expected - set(self._received):
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(
                    f"ranks {sorted(missing)} gave no result in "
                    f"{self._timeout_s} s\n{self._stacks()}"
                )
            ready = connection.wait([self._results[r] for r in missing], timeout=left)
            self._receive([r for r in missing if self._results[r] in ready])
        return {rank: self._received[rank] for rank in expected}

    def _receive(self, ranks):
        dead = {}
        for rank in ranks:
            try:
                self._received[rank] = pickle.loads(self._results[rank].recv_bytes())
            except (EOFError, ConnectionError):
                self.processes[rank].join(timeout=ENDS_WITHIN_S)
                dead[rank] = self.processes[rank].exitcode
        if dead:
            raise AssertionError(f"ranks died without a result: {dead}")

    def join(self):
        """Return the results by rank, once all processes have ended by themselves."""
        try:
            outcomes = self.outcomes()
            for rank, (ok, value) in sorted(outcomes.items()):
                assert ok, f"rank {rank} failed:\n{value}"
            self._await_ends()
            codes = [process.exitcode for process in self.processes]
            assert not any(codes), f"exit codes: expected zeros, got {codes}"
            return [outcomes[rank][1] for rank in range(len(self.processes))]
        finally:
            self.close()

    def _await_ends(self):
        limit = min(self._deadline, time.monotonic() + ENDS_WITHIN_S)
        limit = max(limit, time.monotonic() + 5.0)
        for rank, process in enumerate(self.processes):
            process.join(timeout=max(0.1, limit - time.monotonic()))
            assert process.exitcode is not None, (
                f"rank {rank} gave its result and did not end\n{self._stacks()}"
            )

    def close(self):
        """End all processes; those that have given their result may do so alone."""
        for rank, process in enumerate(self.processes):
            if rank in self._received:
                process.join(timeout=max(0.1, self._deadline - time.monotonic(), 5.0))
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # it may not lead a process group yet
                process.join()
        for receiver in self._results:
            receiver.close()
        self._folder.cleanup()

    def _stacks(self):
        parts = []
        for rank in range(len(self.processes)):
            path = os.path.join(self._folder.name, str(rank))
            if os.path.exists(path):
                with open(path) as file:
                    parts.append(f"--- rank {rank}\n{file.read()}")
        return "\n".join(parts)


@atexit.register
def _kill_all():
    # Before multiprocessing asks its daemons to end and waits: a stopped one cannot.
    for process in multiprocessing.active_children():
        process.kill()


def run_ranks(fn, world_size, *args, timeout_s=100.0, fresh=False):
    """Run ``fn(rank, *args)`` in `world_size` processes; return results by rank."""
    return Ranks(fn, world_size, *args, timeout_s=timeout_s, fresh=fresh).join()
