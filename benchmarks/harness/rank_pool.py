"""Processes that are started once and then take one command at a time.

Between commands they wait for the next one asleep, so what is timed meanwhile in
another process has the machine to itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.child import RunFailed

Handler = Callable[..., Any]
MakeHandler = Callable[..., Handler]
END_DEADLINE_S = 10.0


class RankPool:
    """A handler in each of several processes.

    Args:
        make: Called in each process as ``make(rank, world_size, store, *args)``;
            returns what answers the commands. An importable function.
        world_size: Number of processes.
        args: Further arguments of `make`.
        timeout_s: Longest wait for an answer.
    """

    def __init__(
        self, make: MakeHandler, world_size: int, *args: Any, timeout_s: float
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._timeout_s = timeout_s
        self._ends: list[Connection] = []
        self._processes = []
        store = str(Path(self._folder.name) / "store")
        for rank in range(world_size):
            end, far_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(far_end, make, (rank, world_size, store, *args)),
                daemon=True,
            )
            process.start()
            far_end.close()  # so that a dead process is noticed here
            self._ends.append(end)
            self._processes.append(process)

    def call(self, *command: Any) -> list[Any]:
        """Send a command to all processes and return their answers by rank.

        Raises:
            RunFailed: a process failed, ended, or did not answer in time; the pool is
                of no use then.
        """
        for end in self._ends:
            with contextlib.suppress(OSError):  # its end is seen below
                end.send(command)
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(self._timeout_s):
                raise RunFailed(
                    f"rank {rank}: expected an answer to {command} within "
                    f"{self._timeout_s:g} s, got none"
                )
            try:
                worked, answer = end.recv()
            except EOFError as error:
                raise RunFailed(
                    f"rank {rank}: expected an answer to {command}, got its end"
                ) from error
            if not worked:
                raise RunFailed(f"rank {rank}: {command} failed:\n{answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(END_DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join(END_DEADLINE_S)
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(end: Connection, make: MakeHandler, args: tuple[Any, ...]) -> None:
    handler: Handler | None = None
    while True:
        try:
            command = end.recv()
        except (EOFError, OSError):
            return
        try:
            if handler is None:
                handler = make(*args)
            answer = (True, handler(*command))
        except BaseException:
            answer = (False, traceback.format_exc())
        end.send(answer)
