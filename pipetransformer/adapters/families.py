"""How the supported model families of Hugging Face's transformers are cut into layers.

A layer is made of the model's own submodules and calls them in the order in which the
model does, so values are those of the model. Between layers travel the hidden states
``(rows, length, width)`` and, of text, the padding mask ``(rows, length)``, which costs
a byte per token where the attention's own mask would cost one per pair of tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
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
            positions = _positions(hidden)
            extra["position_embeddings"] = self.rotary(hidden, positions)
        value = self._call(self, hidden, mask, **extra)
        return value if padding is None else (value, padding)


def _own_rotary(rotary: nn.Module) -> nn.Module:
    """Return a copy that shares the model's config, by which blocks are told alike."""
    config = getattr(rotary, "config", None)
    return copy.deepcopy(rotary, {} if config is None else {id(config): config})


def _positions(hidden: Tensor) -> Tensor:
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

# -- BERT, RoBERTa, ELECTRA ------------------------------------------------------


def _call_bert_embeddings(own: Any, input_ids: Tensor, token_types: Tensor) -> Any:
    value = own.embeddings(input_ids=input_ids, token_type_ids=token_types)
    return own.project(value) if hasattr(own, "project") else value


def _call_embeddings(own: Any, input_ids: Tensor) -> Any:
    return own.embeddings(input_ids=input_ids)


def _call_block(own: Any, hidden: Tensor, mask: Tensor | None, **extra: Any) -> Any:
    return own.block(hidden, attention_mask=mask, **extra)


def _attend_bert(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    return own.attention(hidden, mask)[0]


def _feed_bert(own: Any, hidden: Tensor, _: Tensor | None, size: int) -> Any:
    from transformers.pytorch_utils import apply_chunking_to_forward

    def one(chunk: Tensor) -> Any:
        return own.output(own.intermediate(chunk), chunk)

    return apply_chunking_to_forward(one, size, 1, hidden)


def _embed_bert(base: Any) -> Embed:
    parts = {"embeddings": base.embeddings}
    if hasattr(base, "embeddings_project"):  # of ELECTRA
        parts["project"] = base.embeddings_project
    return Embed(parts, _call_bert_embeddings, mask=1)


def _embed_tokens(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_embeddings, mask=1)


def _whole_bert(base: Any, block: Any, _: int) -> Block:
    make = Attention(base.config, "bidirectional")
    return Block({"block": block}, _call_block, make)


def _halves_bert(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    feed = functools.partial(_feed_bert, size=block.chunk_size_feed_forward)
    first = {"attention": block.attention}
    second = {"intermediate": block.intermediate, "output": block.output}
    make = Attention(base.config, "bidirectional")
    return Block(first, _attend_bert, make), Block(second, feed, None)


# -- DistilBERT ------------------------------------------------------------------


def _attend_distilbert(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    return own.norm(own.attention(hidden, attention_mask=mask)[0] + hidden)


def _feed_distilbert(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.norm(own.ffn(hidden) + hidden)


def _halves_distilbert(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    first = {"attention": block.attention, "norm": block.sa_layer_norm}
    second = {"ffn": block.ffn, "norm": block.output_layer_norm}
    make = Attention(base.config, "bidirectional")
    return Block(first, _attend_distilbert, make), Block(second, _feed_distilbert, None)


# -- ViT, DeiT -------------------------------------------------------------------


def _call_vit_embeddings(own: Any, pixels: Tensor) -> Any:
    dtype = own.embeddings.patch_embeddings.projection.weight.dtype
    return own.embeddings(pixels.to(dtype))


def _attend_vit(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    return own.dropout(own.attention(own.norm(hidden), mask)[0]) + hidden


def _feed_vit(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.dropout(own.mlp(own.norm(hidden))) + hidden


def _embed_vit(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_vit_embeddings, mask=None)


def _whole_vit(_: Any, block: Any, __: int) -> Block:
    return Block({"block": block}, _call_block, None)


def _halves_vit(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    first = {"norm": block.layernorm_before, "attention": block.attention}
    second = {"norm": block.layernorm_after, "mlp": block.mlp}
    # Each half has a dropout of its own: layers share no module.
    own = [nn.Dropout(block.dropout.p).train(block.training) for _ in range(2)]
    return (
        Block({**first, "dropout": own[0]}, _attend_vit, None),
        Block({**second, "dropout": own[1]}, _feed_vit, None),
    )


# -- GPT-2 -----------------------------------------------------------------------


def _call_gpt2_embeddings(own: Any, input_ids: Tensor) -> Any:
    value = own.wte(input_ids)
    return own.drop(value + own.wpe(_positions(value)))


def _attend(own: Any, hidden: Tensor, mask: Tensor | None, **extra: Any) -> Any:
    return own.attn(own.norm(hidden), attention_mask=mask, **extra)[0] + hidden


def _feed(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return hidden + own.mlp(own.norm(hidden))


def _embed_gpt2(base: Any) -> Embed:
    parts = {"wte": base.wte, "wpe": base.wpe, "drop": base.drop}
    return Embed(parts, _call_gpt2_embeddings, mask=1)


def _whole_gpt2(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, _call_block, Attention(base.config, "causal"))


def _halves_gpt2(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    first = {"norm": block.ln_1, "attn": block.attn}
    second = {"norm": block.ln_2, "mlp": block.mlp}
    make = Attention(base.config, "causal")
    return Block(first, _attend, make), Block(second, _feed, None)


# -- Llama, Qwen2, Qwen3 ---------------------------------------------------------


def _call_tokens(own: Any, input_ids: Tensor) -> Any:
    return own.tokens(input_ids)


def _embed_llama(base: Any) -> Embed:
    return Embed({"tokens": base.embed_tokens}, _call_tokens, mask=1)


def _causal(base: Any, index: int) -> Attention:
    kinds = getattr(base.config, "layer_types", None)
    slides = kinds is not None and kinds[index] == "sliding_attention"
    return Attention(base.config, "sliding" if slides else "causal")


def _whole_llama(base: Any, block: Any, index: int) -> Block:
    make = _causal(base, index)
    return Block({"block": block}, _call_block, make, base.rotary_emb)


def _halves_llama(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first = {"norm": block.input_layernorm, "attn": block.self_attn}
    second = {"norm": block.post_attention_layernorm, "mlp": block.mlp}
    make = _causal(base, index)
    return Block(first, _attend, make, base.rotary_emb), Block(second, _feed, None)


# -- the table -------------------------------------------------------------------

_TEXT_TASKS = (
    "sequence-classification",
    "token-classification",
    "question-answering",
)

_BERT = Family(
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    tasks=_TEXT_TASKS,
    embed=_embed_bert,
    blocks=lambda base: base.encoder.layer,
    whole=_whole_bert,
    halves=_halves_bert,
    tail=("pooler",),
)
_VIT = Family(
    inputs=("pixel_values",),
    tasks=("image-classification",),
    embed=_embed_vit,
    blocks=lambda base: base.layers,
    whole=_whole_vit,
    halves=_halves_vit,
    tail=("layernorm",),
    ragged=False,
)
_LLAMA = Family(
    inputs=("input_ids", "attention_mask"),
    tasks=("causal-lm",),
    embed=_embed_llama,
    blocks=lambda base: base.layers,
    whole=_whole_llama,
    halves=_halves_llama,
    tail=("norm",),
)

FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "electra": _BERT,
    "roberta": dataclasses.replace(
        _BERT, inputs=("input_ids", "attention_mask"), embed=_embed_tokens
    ),
    "distilbert": dataclasses.replace(
        _BERT,
        inputs=("input_ids", "attention_mask"),
        embed=_embed_tokens,
        blocks=lambda base: base.transformer.layer,
        halves=_halves_distilbert,
        tail=(),
    ),
    "vit": _VIT,
    "deit": _VIT,
    "gpt2": dataclasses.replace(
        _LLAMA,
        embed=_embed_gpt2,
        blocks=lambda base: base.h,
        whole=_whole_gpt2,
        halves=_halves_gpt2,
        tail=("ln_f",),
    ),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
"""Families by the ``model_type`` of their configs."""
