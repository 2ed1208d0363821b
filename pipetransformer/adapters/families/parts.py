"""How the supported model families of Hugging Face's transformers are cut into layers.

A layer is made of the model's own submodules and calls them in the order in which the
model does, so values are those of the model. Between layers travel the hidden states
``(rows, length, width)`` and, of text, the padding mask ``(rows, length)``, which costs
a byte per token where the attention's own mask would cost one per pair of tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor] | Tensor
"""What travels between layers: hidden states, of text with the padding mask."""


class Embed(nn.Module):
    """The first layer: from a batch's tensors to hidden states.

    Args:
        parts: Submodules of the model that `call` uses, by name.
        call: Takes the layer and the batch's tensors, the padding mask left out.
        mask: The mask's place among the tensors; None where there is none.
    """

    def __init__(
        self,
        parts: dict[str, nn.Module],
        call: Callable[..., Tensor],
        mask: int | None,
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._call = call
        self._mask = mask

    def forward(self, *tensors: Tensor) -> State:
        """Embed a batch; the mask, 1 or True at tokens, becomes bool."""
        if self._mask is None:
            return self._call(self, *tensors)
        others = [t for k, t in enumerate(tensors) if k != self._mask]
        # An object of its own, which carries what is made of it: the caller may change
        # the batch's, or give it to another model.
        mask = tensors[self._mask].bool()
        return self._call(self, *others), mask.view_as(mask)


class Attention(nn.Module):
    """Gives the layers behind it the mask that the model would make of the padding.

    Args:
        config: The model's.
        kind: ``"bidirectional"``, ``"causal"`` or ``"sliding"`` (causal).
    """

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        self.config = config
        self.kind = kind

    def mask(self, hidden: Tensor, padding: Tensor) -> Tensor | None:
        """Return what the attention of a block takes; made once per micro-batch.

        Args:
            hidden: ``(rows, length, width)``; only shape, dtype and device are used.
            padding: ``(rows, length)`` bool, True at tokens. It carries what was made
                of it to the next layer of the same stage.
        """
        key = (self.kind, hidden.dtype, self.config._attn_implementation)
        made: dict[Any, Tensor | None] = padding.__dict__.setdefault("_masks", {})
        if key not in made:
            from transformers import masking_utils

            make = {
                "bidirectional": masking_utils.create_bidirectional_mask,
                "causal": masking_utils.create_causal_mask,
                "sliding": masking_utils.create_sliding_window_causal_mask,
            }[self.kind]
            given = {"config": self.config, "inputs_embeds": hidden.detach()}
            if self.kind != "bidirectional":  # renamed in transformers 5.24
                names = inspect.signature(make).parameters
                given["cache" if "cache" in names else "past_key_values"] = None
            made[key] = make(attention_mask=padding, **given)
        return made[key]


class Block(nn.Module):
    """A layer behind the first one: a transformer block, or a half of it.

    Args:
        parts: Submodules of the model that `call` uses, by name.
        call: Takes the layer, hidden states and the attention's mask.
        attention: Makes the mask; None where the layer has no attention, or no mask.
        rotary: Makes position embeddings, if the model has them in each block.
    """

    def __init__(
        self,
        parts: dict[str, nn.Module],
        call: Callable[..., Tensor],
        attention: Attention | None,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.attention_mask = attention
        # Its buffers follow from the config: each layer has its own, so that none is
        # shared between a frozen and an active layer.
        self.rotary = None if rotary is None else _own_rotary(rotary)
        self._call = call

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> State:
        """Run the block; the padding mask is handed on as it is."""
        make, extra = self.attention_mask, {}
        mask = None
        if make is not None and padding is not None:
            mask = make.mask(hidden, padding)
        if self.rotary is not None:
            places = positions(hidden)
            extra["position_embeddings"] = self.rotary(hidden, places)
        value = self._call(self, hidden, mask, **extra)
        return value if padding is None else (value, padding)


def _own_rotary(rotary: nn.Module) -> nn.Module:
    """Return a copy that shares the model's config, by which blocks are told alike."""
    config = getattr(rotary, "config", None)
    return copy.deepcopy(rotary, {} if config is None else {id(config): config})


def positions(hidden: Tensor) -> Tensor:
    """Return the positions of a row, ``(1, length)``."""
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


@dataclasses.dataclass(frozen=True)
class Family:
    """How the models of one family are cut.

    Attributes:
        inputs: A batch's entries, in the order in which the first layer takes them.
        tasks: Supported, as `tasks.TASKS` names them.
        embed: Makes the first layer of a base model.
        blocks: Returns a base model's blocks.
        whole: Makes the layer of a block.
        halves: Makes the two layers of a block: attention, then MLP.
        tail: Names of the base model's submodules behind the blocks.
        ragged: Whether rows of different batches differ in length.
    """

    inputs: tuple[str, ...]
    tasks: tuple[str, ...]
    embed: Callable[[Any], Embed]
    blocks: Callable[[Any], Sequence[Any]]
    whole: Callable[[Any, Any, int], Block]
    halves: Callable[[Any, Any, int], tuple[Block, Block]]
    tail: tuple[str, ...] = ()
    ragged: bool = True


# Calls are functions of the module: layers can be pickled.


def call_block(own: Any, hidden: Tensor, mask: Tensor | None, **extra: Any) -> Any:
    """Call a whole block with hidden states and the attention's mask."""
    return own.block(hidden, attention_mask=mask, **extra)
