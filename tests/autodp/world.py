"""What the tests of this room share: a plane per process, with short deadlines."""

import contextlib
import os
from datetime import timedelta

from pipetransformer.autodp import AutoDPConfig, MessagePlane, connect

# The store's server looks up the names of its clients; where no name server
# answers, each look-up would stall it for five seconds. Spawned ranks inherit this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

FAST = AutoDPConfig(
    heartbeat_interval=timedelta(seconds=0.2),
    heartbeat_timeout=timedelta(seconds=4),
    store_timeout=timedelta(seconds=40),
    protocol_timeout=timedelta(seconds=20),
)


@contextlib.contextmanager
def joined(config=FAST):
    """A plane that meets its peers at the end, or tells them why it does not."""
    info, store = connect(config)
    plane = MessagePlane(store, info, config)
    try:
        yield plane
        plane.finish()
    except BaseException as error:
        plane.fail("test", repr(error))
        raise
    finally:
        plane.close()
