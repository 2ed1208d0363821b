"""A user's default group that outlives every model built over it."""

import contextlib
import gc

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Groups that a model outlived: never taken apart, the process ends with them.
_kept = []


@contextlib.contextmanager
def default_group(rank, world_size, *, backend="gloo"):
    """Make the default group, leave it together, and end it after its models.

    A reducer holds its group. Were its reference the last, it would take the group
    apart while it holds the interpreter's lock, and wait for threads of gloo that
    wait for that lock: the process would never end. Build models in a function that
    has returned before the block ends.

    Raises:
        RuntimeError: A model still lives at the end of the block.
    """
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    _kept.append(group)  # frames of an exception hold models
    yield group
    gc.collect()
    living = sum(issubclass(type(o), DistributedDataParallel) for o in gc.get_objects())
    if living:
        raise RuntimeError(f"default group: expected no model left, got {living}")
    dist.barrier()  # the store's host goes last
    dist.destroy_process_group()
    _kept.remove(group)
