"""What frozen layers hand on in a structure: tensors with rows, and a form of the rest.

The rest is fixed: the same for every micro-batch. Where it is plain values and tensors,
its text says so, and records of the rows alone are enough to cache the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipetransformer._extension import hash_bytes
from pipetransformer.core.containers import leaves, map_tensors
from pipetransformer.core.fixed_values import same
from pipetransformer.pipe import NoChunk

_ROWS = torch.empty(0)  # in the place of a tensor with rows
_PLAIN = (type(None), bool, int, float, str)


class Form:
    """A structure without its rows.

    Args:
        output: What the layers gave.
        have_rows: Of each of its tensors, in order.
    """

    def __init__(self, output: Any, have_rows: Sequence[bool]) -> None:
        self.have_rows = list(have_rows)
        flags = iter(self.have_rows)
        self._tree = map_tensors(
            output, lambda tensor: _ROWS if next(flags) else tensor
        )

    def rows_of(self, output: Any) -> tuple[Tensor, ...]:
        """Return the tensors with rows of another output of this form."""
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        pairs = zip(tensors, self.have_rows, strict=True)
        return tuple(tensor for tensor, has_rows in pairs if has_rows)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with these rows; fixed tensors are `NoChunk`.

        These are copies: the layers behind may work in place.
        """
        rows = iter(tensors)
        return map_tensors(
            self._tree,
            lambda leaf: next(rows) if leaf is _ROWS else NoChunk(leaf.clone()),
        )

    def fits(self, output: Any) -> bool:
        """Tell whether another output of these layers differs in rows alone."""
        mine, others = list(leaves(self._tree)), list(leaves(output))
        return len(mine) == len(others) and all(
            isinstance(other, Tensor) if leaf is _ROWS else same(leaf, other)
            for leaf, other in zip(mine, others, strict=True)
        )

    def has_numbers(self) -> bool:
        """Tell whether numbers or tensors are fixed: they may come of shapes."""
        names = (type(None), bool, str)
        fixed = (leaf for leaf in leaves(self._tree) if leaf is not _ROWS)
        return not all(type(leaf) in names for leaf in fixed)

    def __eq__(self, other: object) -> bool:
        """Tell whether both consist of the same."""
        if self is other or not isinstance(other, Form):
            return self is other
        text = self.text()
        return text is not None and text == other.text()

    __hash__ = None  # type: ignore[assignment]

    def text(self) -> str | None:
        """Return all that it consists of; None: something has no text that tells."""
        try:
            return _text(self._tree)
        except TypeError:
            return None


class HandedOn(NamedTuple):
    """Rows of a batch in the form that they are handed on in."""

    tensors: tuple[Tensor, ...]
    form: Form


def handed_on(pieces: Sequence[Any], have_rows: Sequence[bool]) -> list[Any]:
    """Return the outputs of pieces of a batch, all in one form.

    Tuples of tensors with rows stay what they are.

    Raises:
        TypeError: pieces differ in what has no rows.
    """
    form, first = Form(pieces[0], have_rows), pieces[0]
    parts = first if isinstance(first, (tuple, list)) else [None]
    if all(have_rows) and all(isinstance(part, Tensor) for part in parts):
        return list(pieces)
    if not all(form.fits(piece) for piece in pieces[1:]):
        raise TypeError(
            "frozen layers: expected equal values for each micro-batch where they have "
            "no rows, got others"
        )
    return [HandedOn(form.rows_of(piece), form) for piece in pieces]


def of_one_form(values: Sequence[Any]) -> bool:
    """Tell whether parts of a batch differ in rows alone, as far as forms tell."""
    forms = [value.form if isinstance(value, HandedOn) else None for value in values]
    return all(form == forms[0] for form in forms)


def as_given(value: Any) -> Any:
    """Return what the layers hand on, as the next one gets it."""
    return value.form.filled(value.tensors) if isinstance(value, HandedOn) else value


def beside_tensors(inputs: Any) -> str | None:
    """Return the plain values of a batch's inputs as text.

    Returns:
        Empty where there are none; None if a value has no text that tells.
    """
    others = (leaf for leaf in leaves(inputs) if not isinstance(leaf, Tensor))
    try:
        return ", ".join(
            repr(leaf) if isinstance(leaf, Number) else _text(leaf) for leaf in others
        )
    except TypeError:
        return None


def _text(tree: Any) -> str:
    if tree is _ROWS:
        return "rows"
    if isinstance(tree, Tensor):
        tensor = tree.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tensor.dtype} {tuple(tensor.shape)} {hash_bytes(content):016x}"
    kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
    return f"{kind}({', '.join(_parts(tree))})"


def _parts(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield f"{_text(key)}: {_text(part)}"
    elif isinstance(tree, (tuple, list)):
        yield from map(_text, tree)
    elif type(tree) in _PLAIN:
        yield repr(tree)
    else:
        raise TypeError(f"a {type(tree).__name__}")
