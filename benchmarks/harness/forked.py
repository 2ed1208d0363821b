"""Processes forked from a server that has loaded everything they need.

A fresh interpreter loads torch for seconds; a fork of one that did so starts at once.
The server has no threads and no connections. Processes report by files: what a killed
one wrote stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# The store's server looks up the names of its clients; where no name server answers,
# each look-up would stall it for five seconds.
QUIET = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
END_S = 60.0
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Log:
    """Lines of JSON in a file, each written at once; `at` is in seconds, monotonic.

    The clock is the machine's, equal for all of its processes.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **content: Any) -> None:
        """Append a line."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **content})
        os.write(self._file, line.encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; none if there is no such file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # a line may just be being written
    return [json.loads(line) for line in lines]


def fork_server(*preload: str) -> Any:
    """Return a context whose processes are forks of a server that imported `preload`.

    The server is one per process: the first call decides what it has loaded. It ends
    with this process, and what it has forked ends with it.
    """
    here = Path(__file__).resolve().parents[1]
    # The server does not take over sys.path (python issue 117378).
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    context = multiprocessing.get_context("forkserver")
    if preload:
        context.set_forkserver_preload(["harness.preload", *preload])
    before = dict(os.environ)
    os.environ.update(QUIET, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Ranks:
    """Processes that run ``work(rank, folder, *args)`` under torchrun's variables.

    Args:
        work: An importable function; it logs what it has to say.
        world_size: Number of processes.
        folder: For the logs: ``rank-<rank>.out`` holds the traceback of an error.
        args: Further arguments of `work`.
        own_store: A process of its own serves the store, so that any rank may go.
    """

    def __init__(
        self,
        work: Callable[..., None],
        world_size: int,
        folder: Path,
        *args: Any,
        own_store: bool = True,
    ) -> None:
        context = fork_server()
        self.folder = folder
        self.store: Any = None
        port = free_port()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if own_store:
            environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            self.store = context.Process(
                target=_serve_store, args=(port, folder), daemon=True
            )
            self.store.start()
            self._wait_for_store()
        self.processes = []
        for rank in range(world_size):
            mine = {**environ, **_place(rank, world_size), "PT_STORE_PID": self._pid()}
            process = context.Process(
                target=_run, args=(work, rank, folder, mine, args), daemon=True
            )
            process.start()
            self.processes.append(process)

    def _pid(self) -> str:
        return "" if self.store is None else str(self.store.pid)

    def _wait_for_store(self) -> None:
        end = time.monotonic() + END_S
        while not (self.folder / "store").exists():
            if time.monotonic() > end:
                raise RuntimeError("store: expected it to listen, got nothing")
            time.sleep(0.01)

    def logs(self) -> list[list[dict[str, Any]]]:
        """Return what each rank has logged so far."""
        ranks = range(len(self.processes))
        return [read_log(self.folder / f"rank-{rank}.jsonl") for rank in ranks]

    def errors(self) -> list[str]:
        """Return the traceback with which each rank ended, or an empty text."""
        paths = [self.folder / f"rank-{r}.out" for r in range(len(self.processes))]
        return [path.read_text() if path.exists() else "" for path in paths]

    def close(self) -> None:
        """Kill what still runs, stopped processes too."""
        found = [*self.processes, *([self.store] if self.store is not None else [])]
        for process in found:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, signal.SIGKILL)
        for process in found:
            process.join(END_S)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _end_with_server() -> None:
    """Ask the kernel to kill this process, stopped or not, when its server ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _run(
    work: Callable[..., None],
    rank: int,
    folder: Path,
    environ: Mapping[str, str],
    args: tuple[Any, ...],
) -> None:
    import torch

    _end_with_server()
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        work(rank, folder, *args)
    except BaseException:
        (folder / f"rank-{rank}.out").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _serve_store(port: int, folder: Path) -> None:
    from torch._C._distributed_c10d import TCPStore

    _end_with_server()
    server = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=END_S),
    )
    (folder / "store").write_text(str(server.port))
    while True:
        signal.pause()
