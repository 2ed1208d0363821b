"""What layers of causal language models need besides `parts`: forms of their blocks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    positions,
)


@dataclasses.dataclass(frozen=True)
class Form:
    """Names of the submodules of a base model and of its blocks.

    Where a name is that of a number, it is the rate of a dropout or a factor. Several
    names in one, with spaces, are called one after the other.

    Attributes:
        tokens: Embeds ids.
        after: Follows the embeddings.
        layers: The blocks.
        rotary: Makes position embeddings; there may be none.
        attention: Of a block: what goes before its attention, that, and what follows it
            before both are added to the hidden states.
        recurrent: What is in place of the attention of a block where the config's
            types of layers tell of a convolution or a linear attention.
        feed: The same of its MLP.
        masks: ``"causal"``; ``"window"``, sliding if the config has a window;
            ``"types"``, sliding, or the padding, where the config's types of layers say
            so; ``"padding"``, of blocks without attention.
        parallel: The config's entry that tells whether attention and MLP of a block
            read the same hidden states, so that it stays whole; ``"always"``: it does.
    """

    tokens: str = "embed_tokens"
    after: str = ""
    layers: str = "layers"
    rotary: str = "rotary_emb"
    attention: tuple[str, str, str] = ("input_layernorm", "self_attn", "")
    recurrent: tuple[str, str, str] = ("input_layernorm", "linear_attn", "")
    feed: tuple[str, str, str] = ("post_attention_layernorm", "mlp", "")
    masks: str = "causal"
    parallel: str = ""


# -- the first layer ---------------------------------------------------------------


class Tokens(Embed):
    """The first layer of a decoder; it marks tokens in the padding mask.

    A decoder classifies a sequence by its last token that is not
    ``config.pad_token_id``. The batch's mask does not tell which that is: most decoders
    are padded with the token that ends a text.

    Args:
        parts: As of `Embed`.
        call: Takes the layer, ids and mask, ``(rows, length)`` int64 and bool.
        config: The model's.
    """

    def __init__(self, parts: dict[str, nn.Module], call: Any, config: Any) -> None:
        super().__init__(parts, call, mask=1)
        self.config = config

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Embed ids; the mask, 1 or True at tokens, becomes that of `parts.State`."""
        ids, mask = tensors
        there = mask.bool()
        marks = there.to(torch.uint8)
        pad = self.config.get_text_config().pad_token_id
        if pad is not None:
            marks = marks + (there & (ids == pad))
        return self._call(self, ids, there), marks


class Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product."""
        return hidden * self.factor


def _part(owner: Any, name: str) -> nn.Module:
    """Return a submodule by name, or what a number by that name stands for."""
    if " " in name:
        return nn.Sequential(*(_part(owner, each) for each in name.split()))
    part = getattr(owner, name) if name else nn.Identity()
    if isinstance(part, nn.Module):
        return part
    return nn.Dropout(part) if name.endswith("dropout") else Times(part)


def _call_tokens(own: Any, ids: Tensor, _: Tensor) -> Any:
    return own.after(own.tokens(ids))


def _embed(base: Any, form: Form) -> Embed:
    check(base.config)
    parts = {"tokens": getattr(base, form.tokens), "after": _part(base, form.after)}
    return Tokens(parts, _call_tokens, base.config)


def check(config: Any) -> None:
    """Raise a ValueError for what layers cannot do as the model does."""
    wanted = {
        "output_router_logits=False": "the loss of the routers is one over all layers",
        "layerdrop=0.0": "no blocks are left out",
        "use_bidirectional_attention=False": "the mask of these layers is causal",
        "add_cross_attention=False": "there is no encoder",
        "hidden_size_per_layer_input=0": "no block reads the tokens once more",
        "num_kv_shared_layers=0": "each block has keys and values of its own",
        "z_loss_coefficient=0": "the layers' loss is that of the next token alone",
    }
    for setting, reason in wanted.items():
        found = getattr(config, setting.partition("=")[0], None)
        if found and found != "vision":  # of images, which no layer takes
            raise ValueError(
                f"model: expected config.{setting}, since {reason}, got {found}"
            )


# -- blocks ------------------------------------------------------------------------


def first_of(value: Any) -> Any:
    """Return the first of a tuple, or what is none."""
    return value[0] if isinstance(value, tuple) else value


def placed(hidden: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
    """Add positions to rotary embeddings: some models look at both."""
    return {**extra, "position_ids": positions(hidden)} if extra else extra


def _call_block(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    more = placed(hidden, extra)
    return first_of(own.block(hidden, attention_mask=mask, **more))


def _attend(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    more = placed(hidden, extra)
    value = own.attn(own.norm(hidden), attention_mask=mask, **more)
    return hidden + own.after(first_of(value))


def _feed(own: Any, hidden: Tensor, _: Any) -> Any:
    return hidden + own.after(first_of(own.mlp(own.norm(hidden))))


class Padding(Attention):
    """Gives blocks without attention the padding itself.

    Args:
        config: The model's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, "padding")

    def make(self, hidden: Tensor, there: Tensor, **_: Any) -> Any:
        """Make what `mask` returns."""
        return there


RECURRENT = ("linear_attention", "conv", "mamba")
"""Types of blocks without attention."""


def type_of(config: Any, index: int) -> str:
    """Return the type of a block, such as ``"full_attention"``."""
    types = getattr(config, "layers_block_type", None)
    return str((config.layer_types if types is None else types)[index])


def around(base: Any, index: int, form: Form) -> tuple[Any, Any, Any]:
    """Return what makes a block's masks and rotary embeddings, and their type."""
    config, layer_type, make = base.config, None, Attention(base.config, "causal")
    slides = form.masks == "window" and config.sliding_window is not None
    if form.masks == "types":
        layer_type = type_of(config, index)
        slides = layer_type == "sliding_attention"
    if slides:
        make = Attention(config, "sliding")
    if form.masks == "padding" or layer_type in RECURRENT:
        make = Padding(config)
    rotary = getattr(base, form.rotary, None)
    if (
        rotary is None
        or "layer_type" not in inspect.signature(rotary.forward).parameters
    ):
        layer_type = None  # they are the same in all blocks
    return make, rotary, layer_type


def _whole(base: Any, block: Any, index: int, form: Form) -> Block:
    return Block({"block": block}, _call_block, *around(base, index, form))


def halves(base: Any, block: Any, index: int, form: Form) -> tuple[Block, ...]:
    """Make attention and MLP of a block; one layer where both read the same."""
    if form.parallel == "always" or getattr(base.config, form.parallel, False):
        return (_whole(base, block, index, form),)
    make, *rotary = around(base, index, form)
    attention = form.attention
    if isinstance(make, Padding):
        attention, rotary = form.recurrent, []
    first, second = (
        dict(zip(("norm", name, "after"), (_part(block, n) for n in half), strict=True))
        for name, half in (("attn", attention), ("mlp", form.feed))
    )
    return Block(first, _attend, make, *rotary), Block(second, _feed, None)


def family(
    form: Form, tail: tuple[str, ...] = ("norm",), fp32_token_loss: bool = True
) -> Family:
    """Return how models of a form are cut; the last two are as of `Family`."""
    return Family(
        inputs=("input_ids", "attention_mask"),
        tasks=(
            "causal-lm",
            "sequence-classification",
            "token-classification",
            "question-answering",
        ),
        embed=functools.partial(_embed, form=form),
        blocks=lambda base: getattr(base, form.layers),
        whole=functools.partial(_whole, form=form),
        halves=functools.partial(halves, form=form),
        tail=tail,
        fp32_token_loss=fp32_token_loss,
        pools_last=True,
    )
