"""Structures of tensors that share their rows: call, list, slice, join.

A layer's inputs and outputs are a tensor, a tuple or list, or a mapping of such. A
tensor is one argument, a tuple or list positional ones, a mapping keywords of the
first layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipetransformer.core.containers import refilled
from pipetransformer.core.devices import to_device
from pipetransformer.core.fixed_values import same


def arguments_of(
    value: Any, *, first: bool = True
) -> tuple[Any, ...] | Mapping[str, Any]:
    """Return the arguments of a layer.

    Args:
        value: What it is given: a tuple or list holds positional arguments.
        first: It is the model's first layer, so a mapping holds keywords; to others
            it is one argument.
    """
    if first and isinstance(value, Mapping):
        return value
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def call_with(function: nn.Module, value: Any, *, first: bool = True) -> Any:
    """Call a module with the arguments that a structure stands for."""
    arguments = arguments_of(value, first=first)
    if isinstance(arguments, Mapping):
        return function(**arguments)
    return function(*arguments)


def call_layers(
    layers: Sequence[nn.Module],
    inputs: Any,
    *,
    first: bool = True,
    follow: bool = False,
) -> Any:
    """Run layers in order, spreading tuples between them as the pipeline does.

    Args:
        layers: Consecutive layers of the user's Sequential.
        inputs: What the first one takes.
        first: As for `arguments_of`.
        follow: Bring to each layer's device what it takes.
    """
    value = inputs
    for output in layer_outputs(layers, inputs, first=first, follow=follow):
        value = output
    return value


def layer_outputs(
    layers: Sequence[nn.Module],
    inputs: Any,
    *,
    first: bool = True,
    follow: bool = False,
) -> Iterator[Any]:
    """Run layers as `call_layers` does, and yield what each returns."""
    value = inputs
    for layer in layers:
        place = next(layer.parameters(), None) if follow else None
        if place is not None:
            value = to_device(value, place.device)
        value = call_with(layer, value, first=first)
        first = False
        yield value


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors of a structure in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for key in sorted(value, key=str) for t in tensors_of(value[key])]
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors_of(part)]
    return []


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def rows_of(value: Any) -> int:
    """Return the rows of the first tensor of a structure, 0 without one."""
    tensors = tensors_of(value)
    return len(tensors[0]) if tensors and tensors[0].dim() > 0 else 0


def flat_tensors(value: Any, rows: int) -> tuple[Tensor, ...] | None:
    """Return a tensor or flat tuple of tensors with `rows` rows, else None."""
    parts = (value,) if isinstance(value, Tensor) else value
    if not isinstance(parts, (tuple, list)) or not parts:
        return None
    for part in parts:
        if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != rows:
            return None
    return tuple(parts)


def has_texts_by_row(value: Any, rows: int) -> bool:
    """Tell whether the inputs of a batch hold a list with a text for each row.

    So `torch.utils.data.default_collate` brings together what samples say in words.

    Args:
        value: The inputs; tensors may have been cut to fewer rows.
        rows: Of the batch, as it was collated.
    """
    if isinstance(value, Mapping):
        return any(has_texts_by_row(part, rows) for part in value.values())
    if not isinstance(value, (tuple, list)):
        return False
    texts = len(value) == rows > 1 and all(isinstance(part, str) for part in value)
    return texts or any(has_texts_by_row(part, rows) for part in value)


def slice_rows(value: Any, rows: slice | Tensor) -> Any:
    """Take rows of every tensor of a structure; other values stay as they are."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Mapping):
        return {key: slice_rows(part, rows) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return refilled(value, [slice_rows(part, rows) for part in value])
    return value


def join_rows(pieces: Sequence[Any]) -> Any:
    """Concatenate equal structures along their rows.

    Raises:
        TypeError: the pieces differ in what is not a tensor.
    """
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces))
    if isinstance(first, Mapping):
        return {key: join_rows([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, (tuple, list)):
        columns = zip(*pieces, strict=True)
        return refilled(first, [join_rows(list(column)) for column in columns])
    if not all(same(piece, first) for piece in pieces):
        raise TypeError(
            "outputs of micro-batches: expected equal values where they are no "
            f"tensors, got {list(pieces)}"
        )
    return first


def fit_together(pieces: Sequence[Any]) -> bool:
    """Tell whether the tensors of equal structures differ in rows alone."""
    shapes = ([tensor.shape[1:] for tensor in tensors_of(piece)] for piece in pieces)
    first = next(shapes, [])
    return all(other == first for other in shapes)


def stack_rows(samples: list[Any]) -> Any:
    """Collate samples as torch does by default, where no ``collate_fn`` is given.

    Raises:
        TypeError: a sample holds something that is no tensor, array or number.
        ValueError: samples differ in shape, or do not have the same parts.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, KeyError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"samples: expected {len(samples)} that stack to a batch, got {error}; "
            "give a collate_fn, such as a data collator that pads to the longest, and "
            "leave out what is no tensor or number"
        ) from error


Tree: TypeAlias = "Tensor | tuple[Tree, ...] | list[Tree] | dict[str, Tree]"
"""What a collate function returns: tensors in tuples, lists and dicts."""

_CONTAINERS = (Tensor, Mapping, tuple, list)


def no_rows(tree: object) -> Tree:
    """Return inputs or targets without their rows: trailing shapes and values stay."""
    if isinstance(tree, Tensor):
        return tree[:0]
    if isinstance(tree, Mapping):
        return {key: no_rows(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return refilled(tree, [no_rows(part) for part in tree])  # type: ignore[no-any-return]
    if isinstance(tree, list):
        # One of a leaf per sample, such as strings, has no rows either.
        return [no_rows(part) for part in tree if isinstance(part, _CONTAINERS)]
    return cast(Tree, tree)


def checked_rows(inputs: Tree, rows: int) -> Tree:
    """Return inputs whose tensors all have `rows` rows.

    Raises:
        ValueError: one has not.
    """
    for tensor in tensors_of(inputs):
        if tensor.dim() == 0 or len(tensor) != rows:
            raise ValueError(
                f"inputs: expected {rows} rows in each tensor, one per sample id, got "
                f"shape {tuple(tensor.shape)}; let a layer make what belongs to no "
                "sample, such as a table of positions"
            )
    return inputs


def num_rows(tree: object) -> int | None:
    """Return the rows of the first tensor that has any; None without one."""
    if isinstance(tree, Tensor):
        return len(tree) if tree.dim() else None
    if not isinstance(tree, (Mapping, tuple, list)):
        return None
    values = tree.values() if isinstance(tree, Mapping) else tree
    return next((rows for v in values if (rows := num_rows(v)) is not None), None)
