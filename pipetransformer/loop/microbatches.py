"""Runs a fixed set through the model in micro-batches that no plan changes.

A row's bits may depend on the shape it is computed in, so the set is cut into
micro-batches that depend on its length alone. Hence outputs are bitwise equal under
every plan of the same weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipetransformer.core.devices import beside, to_device
from pipetransformer.data.loading import collated_batches
from pipetransformer.data.structures import arguments_of, checked_rows
from pipetransformer.replica.draws import position_of_evaluation
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run

T = TypeVar("T")


def microbatches(total: int, most_rows: int) -> list[range]:
    """Cut sample ids into the fewest micro-batches of at most `most_rows` rows.

    They are at most one row apart, so that replicas with equally many have equally
    much to do.
    """
    count = -(-total // most_rows)
    ends = [total * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


@dataclasses.dataclass(frozen=True)
class FixedSet:
    """Samples that run through the model once, in their order.

    Attributes:
        dataset: Map-style, with a length.
        name: Its id space in the cache.
        collate: A list of samples to a batch; None: torch's.
        num_workers: Loader processes of each replica; 0: none.

    Raises:
        ValueError: no sample, or the name of the training set.
    """

    dataset: Any
    name: str
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        """Check the set and its name, on every rank."""
        if len(self) == 0:
            raise ValueError("evaluation set: expected at least one sample, got none")
        if self.name == "train":
            raise ValueError(
                "name: expected another one than the training set's 'train'"
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)


@contextlib.contextmanager
def evaluating(run: Run, replica: Replica, samples: FixedSet) -> Iterator[None]:
    """Hold the model in eval mode without gradients, with a cache for the set.

    Args:
        run: The run.
        replica: What this rank drives.
        samples: The set.
    """
    name = samples.name
    if replica.prefix is not None:
        replica.prefix.refresh()
        if replica.prefix.wants_cache:
            run.caches.obtain(name, len(samples), run.in_force.layout)
            run.caches.begin_pass(name)
    still, exact = run.freezer.evaluating(), run.precision.autocast()
    with still, run.guarded(), torch.no_grad(), exact:
        yield


def forward_share(
    run: Run,
    replica: Replica,
    samples: FixedSet,
    *,
    divide: Callable[[Any], tuple[Any, Any]],
    keep: Callable[[Any, Any, int], T],
) -> list[T]:
    """Run this replica's micro-batches, which follow each other in the set.

    Args:
        run: The run.
        replica: What this rank drives.
        samples: The set.
        divide: A batch to inputs and what goes with them.
        keep: Takes outputs, what goes with the inputs, and the number of rows.

    Returns:
        What `keep` has returned for each micro-batch.
    """
    cut = microbatches(len(samples), run.config.eval_microbatch_rows)
    size, index = replica.group.size, replica.group.rank
    begin = len(cut) * index // size
    share = cut[begin : len(cut) * (index + 1) // size]
    prefix, step, name = replica.prefix, run.state.step, samples.name
    cache = run.caches.of(name, len(samples))
    batches = collated_batches(
        samples.dataset,
        share,
        collate_fn=samples.collate,
        num_workers=samples.num_workers,
        seed=run.config.seed,
    )

    def load(rows: range) -> tuple[Any, Tensor]:
        inputs, rest = divide(next(batches))
        return (checked_rows(inputs, len(rows)), rest), torch.tensor(rows)

    def through_prefix(numbered: tuple[int, tuple[Any, Tensor]]) -> Any:
        number, ((inputs, _), ids) = numbered
        if prefix is None:
            return to_device(inputs, replica.pipe.devices[0])
        position = position_of_evaluation(step, number)
        return prefix(lambda: inputs, ids, cache, position=position, whole=True)

    window = 2 * replica.plan.num_stages

    def ask(at: int) -> None:
        if prefix is not None and prefix.uses_disk:
            ids = [i for rows in share[at : at + window] for i in rows]
            run.caches.prefetch(name, ids)

    results: list[T] = []
    ask(0)
    with contextlib.closing(batches):
        for at in range(0, len(share), window):
            run.plane.check()
            ask(at + window)
            loaded = [load(rows) for rows in share[at : at + window]]
            first = position_of_evaluation(step, begin + at)
            replica.pipe.set_draw_position(
                step=first.step, first_microbatch=first.first_microbatch
            )
            numbered = list(enumerate(loaded, begin + at))
            if prefix is None:
                ready = [through_prefix(each) for each in numbered]
            else:
                ready = prefix.spread(through_prefix, numbered)
            outputs = replica.pipe.run(
                [arguments_of(value, first=prefix is None) for value in ready]
            )
            for output, ((_, rest), ids) in zip(outputs, loaded, strict=True):
                results.append(keep(output, beside(output, rest), len(ids)))
    return results


def packed(values: list[Any]) -> bytes:
    """Return tensors in structures, and plain values, as bytes for another rank."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> list[Any]:
    """Read what `packed` gave."""
    values: list[Any] = torch.load(io.BytesIO(data), weights_only=True)
    return values
