"""Measures a model's layers: times at several micro-batch sizes, and bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.core import wire
from pipetransformer.core.devices import move_modules, to_device
from pipetransformer.planner import _values
from pipetransformer.planner._containers import Containers
from pipetransformer.planner._handed_on import check_handed_on, check_outputs
from pipetransformer.planner._in_a_row import run_in_a_row, scaled, time_in_a_row
from pipetransformer.planner._optimizer import OptimizerCost, optimizer_costs
from pipetransformer.planner._saved import layer_bytes
from pipetransformer.planner._timing import LayerTimes, Place, left, time_layers
from pipetransformer.planner.layer_profile import LayerProfile, Profile
from pipetransformer.planner.least_rows import least_rows
from pipetransformer.skip import skip_pairs, verify_skippables

logger = logging.getLogger(__name__)

Inputs: TypeAlias = Union[  # noqa: UP007  # evaluated at run time
    Tensor, tuple[object, ...], list[object], Mapping[str, object]
]


def profile(
    model: nn.Sequential,
    sample: Inputs,
    *,
    microbatch_samples: Sequence[int] = (1, 4, 16),
    repeats: int = 3,
    name: str = "model",
    device: torch.device | str | None = None,
    optimizer: Optimizer | None = None,
) -> Profile:
    """Measure what each layer costs, and leave the model as it was found.

    Each layer runs ``repeats`` times per micro-batch size, forward and backward,
    with the calling thread's intra-op threads; the fastest run counts, since what
    disturbs a run only adds to it. On CPU the clock counts, elsewhere events on the
    current stream. Layers that do the same work, as the blocks of a transformer, are
    measured once and share their times. Measure before anything is frozen: a layer
    none of whose parameters requires a gradient counts as frozen by the user.

    No ``.grad`` is written; buffers, modes and random states are put back.

    The overhead, per micro-batch size and on top of it a pass for each of the three
    largest to count bytes:
    ``2 (repeats + 1)`` forward-backward and ``repeats + 1`` forward passes over the
    layers that differ; one forward over the others. Then, with the largest, runs of all
    layers in a row, one that is not timed and then until there are ``repeats`` or
    0.15 s have passed. It is logged in seconds.

    A layer that pops a skip is called with what was stashed for it, as often as
    needed, and its gradient counts as one to an input. A skip counts in
    ``boundary_bytes_per_sample`` of every layer that it goes past, and of the one
    that stashes it.

    Args:
        model: on the device it is to be measured on, or see `device`. A tuple or list
            leaves a layer is spread into the next layer's arguments.
        sample: inputs of the first layer: a tensor ``(rows, ...)``, a tuple or list of
            arguments, or a dict of keyword arguments.
        microbatch_samples: increasing micro-batch sizes; those above the number of
            rows given are replaced by it, and those for which a device has no memory
            are left out. Batch norm in training mode needs 2 rows,
            so 1 becomes 2.
        repeats: runs per layer and size, at least 1.
        name: of the model, for people.
        device: where to measure; each layer is there only while it runs, so that the
            model need not fit. None: where the model is.
        optimizer: of the model's parameters; what its state takes for each layer, and
            on the host its step, is measured on copies of it and of them. None: not
            measured; nor is that of an optimizer which is none of torch's own.

    Returns:
        The profile. ``weight_grad_activation_bytes_per_sample`` is not measured: it
        repeats ``activation_bytes_per_sample``, its upper bound.

    Raises:
        TypeError: ``model`` is no ``nn.Sequential``, its skips do not fit together,
            or the sample holds no tensor or a sparse one.
        ValueError: an empty model, too few rows, or a malformed option.

    Source: the cost model keeps input gradients (b) and weight gradients (w) apart:
    b is a backward to the inputs alone, w what a full backward adds to it, with the sum
    over micro-batches.
    """
    started = time.perf_counter()
    if not isinstance(model, nn.Sequential):
        raise TypeError(f"model: expected an nn.Sequential, got {type(model).__name__}")
    if len(model) == 0:
        raise ValueError("model: expected at least one layer, got none")
    verify_skippables(model)
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    sizes = _sizes(model, _values.num_rows(sample), microbatch_samples)
    sample, place = _brought(sample, device)
    with _left_as_found(model, next(_values.tensors(sample)).device):
        times: list[list[LayerTimes]] = []
        for size in sizes:
            rows = _values.first_rows(sample, size)
            try:
                times.append(time_layers(model, rows, repeats, place=place))
            except torch.OutOfMemoryError:
                if not times:
                    raise
                logger.warning(
                    "%s: no memory for micro-batches of %d rows, measured up to %d",
                    name,
                    size,
                    sizes[len(times) - 1],
                )
                break
        sizes = sizes[: len(times)]
        largest = sizes[-1]
        if device is None:
            rows = _values.first_rows(sample, largest)
            whole = time_in_a_row(model, rows, repeats)
            times = scaled(times, whole)
        found = None
        with contextlib.suppress(torch.OutOfMemoryError):  # of several calls at once
            found = layer_bytes(model, sample, sizes[:-4:-1], place=place)
        if found is None:  # outside, where nothing of the first try is held any more
            found = layer_bytes(model, sample, [largest], place=place)
    parameter_bytes, trainable_bytes, tied = _parameters(model)
    steps = [OptimizerCost(0, None)] * len(model)
    if optimizer is not None and _is_torchs(optimizer):
        where = None if device is None else torch.device(device)
        steps = optimizer_costs(model, optimizer, device=where)
    layers = [
        _said_in_part(
            trainable_bytes[i],
            name=f"{i}.{type(layer).__name__}"[: wire.LONGEST_NAME],
            **_columns([row[i] for row in times]),
            parameter_bytes=parameter_bytes[i],
            activation_bytes_per_sample=-(-found[i].by_rows // largest),
            weight_grad_activation_bytes_per_sample=-(-found[i].by_rows // largest),
            activation_bytes_per_microbatch=found[i].by_call,
            shared_activation_bytes=found[i].shared,
            boundary_bytes_per_sample=-(-found[i].boundary // largest),
            trainable=any(p.requires_grad for p in layer.parameters()),
            optimizer_ns=steps[i].step_ns,
            optimizer_bytes=steps[i].state_bytes,
        )
        for i, layer in enumerate(model)
    ]
    seconds = time.perf_counter() - started
    logger.info("%s: %d layers measured in %.3f s", name, len(layers), seconds)
    return Profile(
        name=name,
        microbatch_samples=tuple(sizes),
        layers=tuple(layers),
        tied_layers=tied,
        skips=skip_pairs(list(model)),
    )


def check_layers(
    model: nn.Sequential,
    sample: Inputs,
    *,
    boundaries: Collection[int] = (),
    cuts_batches: bool = True,
    joins_outputs: bool = True,
    device: torch.device | str | None = None,
) -> None:
    """Refuse layers whose values cannot be cut, cached or joined along their rows.

    A few rows of the sample, and twice as many, pass the layers up to the last boundary
    in eval mode, and all layers as they are; where more than a tensor is handed on at a
    boundary, so does all of the sample. The model is left as it was found.

    Args:
        model: as for `profile`.
        sample: as for `profile`; of one row alone nothing is compared.
        boundaries: numbers of front layers that may be frozen. What the last of them
            returns has a row per sample, or is the same for every micro-batch.
        cuts_batches: batches may be cut into micro-batches.
        joins_outputs: outputs of micro-batches may be joined.
        device: as for `profile`.

    Raises:
        NeedsWholeBatches: the layers are right for batches that stay whole alone.
        TypeError: a layer before a boundary returns what other micro-batches cannot be
            given, or the last one what cannot be joined.
    """
    least = least_rows(model, as_found=True)
    sample, place = _brought(sample, device)
    with _left_as_found(model, next(_values.tensors(sample)).device):
        check_handed_on(
            model, sample, boundaries, least=least, cuts=cuts_batches, place=place
        )
        if joins_outputs:
            check_outputs(model, sample, least=least, place=place)


def seconds_in_a_row(model: nn.Sequential, sample: Inputs, rows: int) -> float:
    """Run forward and backward of one micro-batch, all layers in a row; return seconds.

    Leaves the model as it was found, as `profile` does.

    Args:
        model: where it is to be measured.
        sample: as for `profile`.
        rows: of the micro-batch; those of the sample at most.
    """
    sizes = _sizes(model, _values.num_rows(sample), [rows])
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    with _left_as_found(model, next(_values.tensors(sample)).device):
        taken = _values.first_rows(sample, sizes[-1])
        return sum(run_in_a_row(model, taken, parameters, sums)) / 1e9


def _is_torchs(optimizer: Optimizer) -> bool:
    """Tell whether steps of a copy are sure to have no other effects."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _brought(sample: Inputs, device: torch.device | str | None) -> tuple[Inputs, Place]:
    """Return the sample where layers are measured, and what brings them there."""
    if device is None:
        return sample, left
    wanted = torch.empty(0, device=device).device
    return to_device(sample, wanted), functools.partial(_on, wanted)


@contextmanager
def _on(device: torch.device, layer: nn.Module) -> Iterator[None]:
    """Hold a layer on a device."""
    tensors = [*layer.parameters(), *layer.buffers()]
    before = tensors[0].device if tensors else device
    move_modules([layer], device)
    try:
        yield
    finally:
        move_modules([layer], before)


def _said_in_part(trainable_bytes: int, **fields: Any) -> LayerProfile:
    """Make a layer; its trainable bytes are left out where they follow."""
    whole = LayerProfile(**fields)
    if trainable_bytes == whole.gradient_bytes:
        return whole
    return dataclasses.replace(whole, trainable_bytes=trainable_bytes)


def _columns(times: Sequence[LayerTimes]) -> dict[str, tuple[int, ...]]:
    """Turn one layer's times, one entry per size, into the profile's fields."""
    columns = zip(*times, strict=True)
    return dict(zip(LayerTimes._fields, columns, strict=True))


def _sizes(
    layers: nn.Sequential, num_rows: int, microbatch_samples: Sequence[int]
) -> list[int]:
    given = list(microbatch_samples)
    if not given or given != sorted(set(given)) or given[0] < 1:
        raise ValueError(
            f"microbatch_samples: expected increasing sizes from 1, got {given}"
        )
    least = least_rows(layers, as_found=True)
    if num_rows < least:
        raise ValueError(f"sample: expected at least {least} rows, got {num_rows}")
    return sorted({min(max(size, least), num_rows) for size in given})


@contextmanager
def _left_as_found(layers: nn.Sequential, device: torch.device) -> Iterator[None]:
    """Put buffers, attributes of modules, their containers and random states back.

    A layer may keep what belongs to a buffer beside it, such as the length that a table
    of positions was made for: one without the other is no state that it knows.
    """
    containers = Containers(map(vars, layers.modules()))
    attributes = [
        (module, dict(vars(module)), dict(module._buffers))
        for module in layers.modules()
    ]
    values = [
        (buffer, buffer.detach().clone())
        for _, _, buffers in attributes
        for buffer in buffers.values()
        if buffer is not None
    ]
    cpu = device.type == "cpu"
    generators = torch.random.fork_rng(
        devices=[] if cpu else [device], device_type="cuda" if cpu else device.type
    )
    try:
        with torch.inference_mode(False), generators:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module, found, buffers in attributes:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its attributes are the compiler's, and no Python's
            for name in vars(module).keys() - found.keys():
                del module.__dict__[name]
            module.__dict__.update(found)
            module._buffers.clear()
            module._buffers.update(buffers)
        containers.put_back()


def _parameters(
    layers: nn.Sequential,
) -> tuple[list[int], list[int], tuple[tuple[int, int], ...]]:
    """Bytes of each layer's parameters and of those that train, and who shares one.

    A shared parameter counts in its first layer: its layers are never separated.
    """
    owners: dict[nn.Parameter, list[int]] = {}
    for i, layer in enumerate(layers):
        for parameter in layer.parameters():
            owners.setdefault(parameter, []).append(i)
    sizes, trainable = [0] * len(layers), [0] * len(layers)
    tied: set[tuple[int, int]] = set()
    for parameter, indices in owners.items():
        size = parameter.numel() * parameter.element_size()
        sizes[indices[0]] += size
        trainable[indices[0]] += size if parameter.requires_grad else 0
        tied.update(combinations(indices, 2))
    return sizes, trainable, tuple(sorted(tied))
