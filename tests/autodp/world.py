"""What the tests of this room share: a plane per process, with short deadlines."""

import contextlib
from datetime import timedelta

from pipetransformer.autodp import AutoDPConfig, MessagePlane, connect

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
