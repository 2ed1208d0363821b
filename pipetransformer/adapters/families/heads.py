"""The last layer where a base model does more behind its blocks than a `Given` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Tail(nn.Module):
    """Stands for the base model in a task model: finishes what the blocks have made.

    Args:
        parts: The base model's submodules behind its blocks, by name.
        call: Takes this module and the hidden states; returns the last hidden states
            and what is pooled of them, or None.
    """

    def __init__(
        self,
        parts: dict[str, nn.Module],
        call: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]],
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._call = call

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        """Return hidden states as a base model returns them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        last, pooled = self._call(self, hidden)
        found: Any = BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=pooled
        )
        found.reshaped_hidden_states = None  # which Swin asks for
        return found


class TailHead(nn.Module):
    """The task model's own forward, which gives its base, a `Tail`, the first input.

    Args:
        model: The task model.
        base: The name of its base model.
        tail: In place of that.
    """

    def __init__(self, model: Any, base: str, tail: Tail) -> None:
        super().__init__()
        self.model = copy.copy(model)
        self.model._modules = {**model._modules, base: tail}

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """Return the logits."""
        return self.model(hidden, return_dict=True).logits


def check_config(config: Any, **expected: Any) -> None:
    """Check what layers can not do, or not as the model does it.

    Args:
        config: Of the model.
        expected: Its values, where it has these.

    Raises:
        ValueError: a value is another one.
    """
    for name, value in expected.items():
        found = getattr(config, name, value)
        if found != value:
            raise ValueError(
                f"config: expected {name}={value!r}, got {found!r}; load the model "
                f"with from_pretrained(..., {name}={value!r})"
            )


def unused(*found: Any) -> None:
    """Have what a task never uses (parameters, modules, None) not train.

    The engine wants a gradient of everything that does.
    """
    for value in found:
        if value is not None:
            value.requires_grad_(False)


def keep(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states as they are: the task pools them by itself."""
    return hidden, None
