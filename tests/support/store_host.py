"""A process that does nothing but serve a store, as torchrun's agent does."""

import contextlib
import os
import signal

from torch.distributed import TCPStore

from tests.support import fork_server
from tests.support.lifeline import die_with

READY_S = 60


def _serve(sender):
    die_with(os.getppid())
    os.setsid()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    while True:
        signal.pause()


class StoreHost:
    """Serves a store at `port` of this host until it is killed or the block ends.

    No rank of ours hosts the store then: `environment` says so to the ranks.
    """

    def __init__(self):
        context = fork_server.context()
        receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(sender,), daemon=True)
        self.process.start()
        sender.close()
        if not receiver.poll(READY_S):
            self.close()
            raise RuntimeError(f"store host: expected a port within {READY_S} s")
        self.port = receiver.recv()
        receiver.close()

    @property
    def pid(self):
        return self.process.pid

    @property
    def environment(self):
        return {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Kill the process, also one that was stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
