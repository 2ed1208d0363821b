"""What a call of a pipeline returns in the old interface."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import torch
from torch.utils import _pytree

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PipeResult(Generic[T]):
    """Holds the output of a call; stands in for the RRef of the old interface.

    The value is always local, and no RPC framework is needed. It is a dataclass, in
    which DistributedDataParallel looks for tensors, and a pytree node, whose leaves
    it hooks.

    Args:
        value: What the last stage returned, put together over the micro-batches.

    Example:
        >>> loss = criterion(pipe(x).local_value(), y)
    """

    value: T

    def local_value(self) -> T:
        """Return the value."""
        return self.value

    def __getattr__(self, name: str) -> NoReturn:
        """Name the way to the output for who takes the result for it.

        Raises:
            AttributeError: always; only missing attributes are asked for here.
        """
        raise AttributeError(
            f"PipeResult has no attribute {name!r}; the output is local_value(), and "
            "Pipe(..., return_tensors=True) returns it bare"
        )

    def to_here(self, timeout: float = -1.0) -> T:
        """Return the value.

        Args:
            timeout: Ignored: nothing has to be fetched.
        """
        return self.value

    def is_owner(self) -> bool:
        """Return True: the value lives in this process."""
        return True

    def backward(
        self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False
    ) -> None:
        """Run backward of the one tensor in the value that requires grad.

        Args:
            dist_autograd_ctx_id: Ignored: the old interface's autograd context.
            retain_graph: As in `torch.Tensor.backward`.

        Raises:
            RuntimeError: if not exactly one tensor of the value requires grad, and as
                `torch.Tensor.backward` for one of several elements.
        """
        tensors = [
            leaf
            for leaf in _pytree.tree_leaves(self.value)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if len(tensors) != 1:
            raise RuntimeError(
                "PipeResult.backward: expected one tensor that requires grad in the "
                f"value, got {len(tensors)}"
            )
        tensors[0].backward(  # type: ignore[no-untyped-call]
            retain_graph=retain_graph
        )


def _flatten(result: PipeResult[T]) -> tuple[list[T], None]:
    return [result.value], None


def _unflatten(values: Iterable[T], context: None) -> PipeResult[T]:
    (value,) = values
    return PipeResult(value)


_pytree.register_pytree_node(
    PipeResult,
    _flatten,
    _unflatten,
    serialized_type_name="pipetransformer.pipe.result.PipeResult",
)
