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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.autocache import Ragged

State = tuple[Tensor, Tensor] | Tensor
"""What travels between layers: hidden states, of text with the padding mask.

The mask is bool, True at tokens; of decoders uint8, 0 at padding, 2 at tokens that are
``config.pad_token_id`` and 1 at others.
"""


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

    def mask(self, hidden: Tensor, padding: Tensor) -> Any:
        """Return what the attention of a block takes; made once per micro-batch.

        Args:
            hidden: ``(rows, length, width)``; only shape, dtype and device are used.
            padding: ``(rows, length)``, not 0 at tokens. It carries what was made of it
                to the next layer of the same stage.
        """
        key = (self.kind, hidden.dtype, self.config._attn_implementation)
        made: dict[Any, Any] = padding.__dict__.setdefault("_masks", {})
        if key not in made:
            made[key] = self.make(hidden.detach(), padding.bool())
        return made[key]

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        """Make what `mask` returns.

        Args:
            hidden: As in `mask`.
            there: ``(rows, length)`` bool, True at tokens.
            more: For the function of transformers that makes masks of this kind.
        """
        from transformers import masking_utils

        make = {
            "bidirectional": masking_utils.create_bidirectional_mask,
            "causal": masking_utils.create_causal_mask,
            "sliding": masking_utils.create_sliding_window_causal_mask,
        }[self.kind]
        given = {"config": self.config, "inputs_embeds": hidden, **more}
        if self.kind != "bidirectional":  # renamed in transformers 5.24
            names = inspect.signature(make).parameters
            given["cache" if "cache" in names else "past_key_values"] = None
        return make(attention_mask=there, **given)


class Block(nn.Module):
    """A layer behind the first one: a transformer block, or a half of it.

    Args:
        parts: Submodules of the model that `call` uses, by name.
        call: Takes the layer, hidden states and the attention's mask.
        attention: Makes the mask; None where the layer has no attention, or no mask.
        rotary: Makes position embeddings, if the model has them in each block.
        layer_type: What the rotary embeddings are asked for, if they differ by layer.
    """

    def __init__(
        self,
        parts: dict[str, nn.Module],
        call: Callable[..., Tensor],
        attention: Attention | None,
        rotary: nn.Module | None = None,
        layer_type: str | None = None,
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.attention_mask = attention
        # Its buffers follow from the config: each layer has its own, so that none is
        # shared between a frozen and an active layer.
        self.rotary = None if rotary is None else _own_rotary(rotary)
        self._layer_types = () if layer_type is None else (layer_type,)
        self._call = call

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> State:
        """Run the block; the padding mask is handed on as it is."""
        make, extra = self.attention_mask, {}
        mask = None
        if make is not None and padding is not None:
            mask = make.mask(hidden, padding)
        if self.rotary is not None:
            places = positions(hidden)
            found = self.rotary(hidden, places, *self._layer_types)
            extra["position_embeddings"] = found
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
        halves: Makes the layers of a block that is split, attention, then MLP. None:
            blocks stay whole, as where both read the same hidden states.
        tail: Names of the base model's submodules behind the blocks.
        ragged: Whether rows of different batches differ in length.
        fp32_token_loss: Whether the model takes the loss of tokens' classes in fp32.
        fp32_masked_loss: The same of masked tokens.
        pools_last: Whether it classifies a sequence by its last token that is not
            ``config.pad_token_id``.
        head: Makes the last layer of a task model; None: `tasks.Head`.
        complete: Takes config and batch; returns the batch with what the model's own
            forward would make of it. None: the batch as it is.
        padding: What is padding, for the cache; None: what the attention mask says, if
            rows are `ragged`.
        untie: Gives what shares weights with the embeddings weights of its own; None:
            the head alone may share them.
    """

    inputs: tuple[str, ...]
    tasks: tuple[str, ...]
    embed: Callable[[Any], nn.Module]
    blocks: Callable[[Any], Sequence[Any]]
    whole: Callable[[Any, Any, int], nn.Module]
    halves: Callable[[Any, Any, int], tuple[nn.Module, ...]] | None = None
    tail: tuple[str, ...] = ()
    ragged: bool = True
    fp32_token_loss: bool = False
    fp32_masked_loss: bool = False
    pools_last: bool = False
    head: Callable[[Any], nn.Module] | None = None
    complete: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    padding: Ragged | None = None
    untie: Callable[[Any], None] | None = None


# Calls are functions of the module: layers can be pickled.


def call_block(own: Any, hidden: Tensor, mask: Tensor | None, **extra: Any) -> Any:
    """Call a whole block with hidden states and the attention's mask."""
    return own.block(hidden, attention_mask=mask, **extra)
