"""The names of a pipeline's state and those of the plain ``nn.Sequential``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import TypeVar, cast

from pipetransformer.pipe.batchnorm import accumulator_names
from pipetransformer.pipe.layers import StageLayers
from pipetransformer.pipe.stage import PipeSequential

T = TypeVar("T")
# A layer's name in the pipeline, its plain name, the names in its own state, and those
# of them that a state may do without.
Layer = tuple[str, str, list[str], Set[str]]


def to_plain_state_dict(
    pipe: StageLayers, state: Mapping[str, T]
) -> OrderedDict[str, T]:
    """Rename a pipeline's state for the Sequential that it was made of.

    ``partitions.{stage}.{layer}.<rest>`` becomes ``<child>.<rest>``, or
    ``<child>.<inner child>.<rest>`` where an inner Sequential was flattened. A
    `WithDevice` leaves no name, and the accumulators of a `DeferredBatchNorm` are left
    out: the state loads with plain batch norm in its place too.

    Args:
        pipe: The pipeline.
        state: All that ``pipe.state_dict()`` names, with accumulators or without; the
            values may be anything.

    Returns:
        The same values in the same order under the plain names, as for
        ``plain.load_state_dict(...)``.

    Raises:
        ValueError: for names that the pipeline does not have, or that are missing.
    """
    layers = _layers(pipe)
    renamed = _rename(state, layers, "pipeline's state")
    for _, plain, _, spare in layers:
        for rest in spare:
            renamed.pop(f"{plain}.{rest}", None)
    return renamed


def from_plain_state_dict(
    pipe: StageLayers, state: Mapping[str, T]
) -> OrderedDict[str, T]:
    """Rename the state of the plain Sequential for a pipeline made of one like it.

    The reverse of `to_plain_state_dict`; the pipeline may be cut differently from the
    one that the state was saved from.

    Args:
        pipe: The pipeline.
        state: All that ``plain.state_dict()`` names, with accumulators or without; the
            values may be anything.

    Returns:
        The same values in the same order, as for ``pipe.load_state_dict(...)``.

    Raises:
        ValueError: for names that the Sequential does not have, or that are missing.
    """
    layers = [(plain, own, names, spare) for own, plain, names, spare in _layers(pipe)]
    return _rename(state, layers, "plain state")


def _layers(pipe: StageLayers) -> list[Layer]:
    found: list[Layer] = []
    for j, stage in enumerate(cast("list[PipeSequential]", list(pipe.partitions))):
        if len(stage.plain_names) != len(stage):
            raise ValueError(
                f"stage {j}: expected the {len(stage.plain_names)} layers that it was "
                f"built of, got {len(stage)}"
            )
        for k, plain in zip(stage._modules, stage.plain_names, strict=True):
            layer = stage.get_submodule(k)
            names = list(layer.state_dict(keep_vars=True))
            spare = accumulator_names(layer)
            found.append((f"partitions.{j}.{k}", plain, names, spare))
    return found


def _rename(
    state: Mapping[str, T], layers: Sequence[Layer], what: str
) -> OrderedDict[str, T]:
    names = {
        f"{old}.{rest}": f"{new}.{rest}"
        for old, new, inner, _ in layers
        for rest in inner
    }
    spare = {f"{old}.{rest}" for old, _, _, may_lack in layers for rest in may_lack}
    unknown = [name for name in state if name not in names]
    missing = [name for name in names if name not in state and name not in spare]
    if unknown or missing:
        raise ValueError(
            f"{what}: expected exactly the names of the model, got unknown {unknown} "
            f"and missing {missing}"
        )
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    # The versions of the modules, which load_state_dict looks for next to the state.
    versions: Mapping[str, object] | None = getattr(state, "_metadata", None)
    if versions is not None:
        prefixes = {old: new for old, new, *_ in layers}
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (prefixes[prefix] + module[len(prefix) :], version)
            for module, version in versions.items()
            for prefix in (_prefix_of(module, prefixes),)
            if prefix is not None
        )
    return renamed


def _prefix_of(module: str, prefixes: Mapping[str, str]) -> str | None:
    """The layer that a module belongs to, by its path."""
    parts = module.split(".")
    paths = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((path for path in paths if path in prefixes), None)
