"""Encoders of text that turn queries and keys by their positions in each block."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.encoder_parts import (
    TEXT_TASKS,
    MaskedEmbed,
    Windowed,
    all_but,
)
from pipetransformer.adapters.families.heads import unused
from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    call_block,
)


def _attention(base: Any, index: int) -> tuple[Attention, Any, str | None]:
    """Return what `Block` takes for the attention of a block."""
    kinds = getattr(base.config, "layer_types", None)
    if kinds is None:
        return Attention(base.config, _BOTH), base.rotary_emb, None
    if kinds[index] == "sliding_attention":
        return Windowed(base.config, "window"), base.rotary_emb, kinds[index]
    return Attention(base.config, _BOTH), base.rotary_emb, kinds[index]


def _whole(base: Any, block: Any, index: int) -> Block:
    return Block({"block": block}, call_block, *_attention(base, index))


# -- norms in front: ModernBERT, EuroBERT ----------------------------------------


def _call_embeddings(own: Any, input_ids: Tensor) -> Any:
    return own.embeddings(input_ids)


def _attend_before(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    return hidden + own.attention(own.norm(hidden), attention_mask=mask, **extra)[0]


def _feed_before(own: Any, hidden: Tensor, _: Any) -> Any:
    return hidden + own.mlp(own.norm(hidden))


def _embed_modernbert(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_embeddings, mask=1)


def _embed_eurobert(base: Any) -> Embed:
    return Embed({"embeddings": base.embed_tokens}, _call_embeddings, mask=1)


def _halves_modernbert(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first = {"norm": block.attn_norm, "attention": block.attn}
    second = {"norm": block.mlp_norm, "mlp": block.mlp}
    attention = _attention(base, index)
    return Block(first, _attend_before, *attention), Block(second, _feed_before, None)


def _halves_eurobert(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first = {"norm": block.input_layernorm, "attention": block.self_attn}
    second = {"norm": block.post_attention_layernorm, "mlp": block.mlp}
    attention = _attention(base, index)
    return Block(first, _attend_before, *attention), Block(second, _feed_before, None)


# -- ESM Cambrian, of proteins; the privacy filter of OpenAI ---------------------


def _attend_scaled(own: Any, hidden: Tensor, mask: Any, by: float, **extra: Any) -> Any:
    found = own.attention(own.norm(hidden), attention_mask=mask, **extra)[0]
    return hidden + found / by


def _feed_scaled(own: Any, hidden: Tensor, _: Any, by: float) -> Any:
    return hidden + own.mlp(own.norm(hidden)) / by


def _halves_esmc(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first, second = _halves_eurobert(base, block, index)
    first._call = functools.partial(_attend_scaled, by=block.scaling_factor)
    second._call = functools.partial(_feed_scaled, by=block.scaling_factor)
    return first, second


def _feed_first(own: Any, hidden: Tensor, _: Any) -> Any:
    return hidden + own.mlp(own.norm(hidden))[0]


def _whole_windowed(base: Any, block: Any, _: int) -> Block:
    make = Windowed(base.config, "window")
    return Block({"block": block}, call_block, make, base.rotary_emb)


def _halves_windowed(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first, second = _halves_eurobert(base, block, index)
    first.attention_mask = Windowed(base.config, "window")
    second._call = _feed_first
    return first, second


# -- RoFormer --------------------------------------------------------------------


class _Sines(Attention):
    """Gives the mask, and by what queries and keys are turned.

    Args:
        base: The base model.
    """

    def __init__(self, base: Any) -> None:
        super().__init__(base.config, _BOTH)
        # The state has them once, as part of the embeddings; blocks hold copies.
        sines = base.encoder.embed_positions.weight.detach().clone()
        self.register_buffer("sines", sines, persistent=False)

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        """Make what `mask` returns."""
        sines: Any = self.sines
        return super().make(hidden, there, **more), sines[None, None, : hidden.shape[1]]


def _call_roformer_embeddings(own: Any, input_ids: Tensor, token_types: Tensor) -> Any:
    value = own.embeddings(input_ids=input_ids, token_type_ids=token_types)
    return own.project(value) if hasattr(own, "project") else value


def _embed_roformer(base: Any) -> Embed:
    parts = {"embeddings": base.embeddings, "sines": base.encoder.embed_positions}
    if hasattr(base, "embeddings_project"):
        parts["project"] = base.embeddings_project
    return Embed(parts, _call_roformer_embeddings, mask=1)


def _call_roformer(own: Any, hidden: Tensor, made: Any) -> Any:
    mask, sines = made
    return own.block(hidden, attention_mask=mask, sinusoidal_pos=sines)[0]


def _attend_roformer(own: Any, hidden: Tensor, made: Any) -> Any:
    mask, sines = made
    return own.attention(hidden, attention_mask=mask, sinusoidal_pos=sines)[0]


def _feed_roformer(own: Any, hidden: Tensor, _: Any) -> Any:
    return own.output(own.intermediate(hidden), hidden)


def _whole_roformer(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, _call_roformer, _Sines(base))


def _halves_roformer(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    first = {"attention": block.attention}
    second = {"intermediate": block.intermediate, "output": block.output}
    return (
        Block(first, _attend_roformer, _Sines(base)),
        Block(second, _feed_roformer, None),
    )


# -- norms behind: GTE, Nomic BERT, Jina Embeddings v3 ---------------------------


def _call_typed_embeddings(own: Any, input_ids: Tensor, token_types: Tensor) -> Any:
    return own.embeddings(input_ids=input_ids, token_type_ids=token_types)


def _attend_behind(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    found = own.attention(hidden, attention_mask=mask, **extra)[0]
    return own.norm(hidden + own.dropout(found))


def _feed_behind(own: Any, hidden: Tensor, _: Any) -> Any:
    return own.norm(hidden + own.dropout(own.mlp(hidden)))


def _embed_gte(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_typed_embeddings, mask=1)


def _halves_gte(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first = {
        "attention": block.self_attn,
        "dropout": block.post_attention_dropout,
        "norm": block.post_attention_layernorm,
    }
    second = {
        "mlp": block.mlp,
        "dropout": block.post_mlp_dropout,
        "norm": block.post_mlp_layernorm,
    }
    attention = _attention(base, index)
    return Block(first, _attend_behind, *attention), Block(second, _feed_behind, None)


# -- ESM, of proteins ------------------------------------------------------------


def _call_esm_embeddings(own: Any, input_ids: Tensor, there: Tensor) -> Any:
    return own.embeddings(input_ids=input_ids, attention_mask=there)


def _attend_esm(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    return own.attention(hidden, attention_mask=mask, **extra)


def _feed_esm(own: Any, hidden: Tensor, _: Any) -> Any:
    return own.output(own.intermediate(own.norm(hidden)), hidden)


def _embed_esm(base: Any) -> Embed:
    unused(getattr(base, "contact_head", None))
    return MaskedEmbed({"embeddings": base.embeddings}, _call_esm_embeddings, mask=1)


def _esm_attention(base: Any) -> tuple[Attention, nn.Module | None]:
    rotary = base.rotary_embeddings
    if rotary is not None:
        # The state has its buffers once, as part of the head; blocks hold copies.
        rotary = copy.deepcopy(rotary, {id(rotary.config): rotary.config})
        for name, buffer in rotary.named_buffers():
            rotary.register_buffer(name, buffer, persistent=False)
    return Attention(base.config, _BOTH), rotary


def _whole_esm(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, call_block, *_esm_attention(base))


def _halves_esm(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    second = {
        "norm": block.LayerNorm,
        "intermediate": block.intermediate,
        "output": block.output,
    }
    return (
        Block({"attention": block.attention}, _attend_esm, *_esm_attention(base)),
        Block(second, _feed_esm, None),
    )


_BOTH = "bidirectional"
_UNTYPED = ("input_ids", "attention_mask")

_GTE = Family(
    inputs=(*_UNTYPED, "token_type_ids"),
    tasks=all_but("question-answering", "multiple-choice"),
    embed=_embed_gte,
    blocks=lambda base: base.layers,
    whole=_whole,
    halves=_halves_gte,
    tail=("pooler",),
)
_EUROBERT = Family(
    inputs=_UNTYPED,
    tasks=_GTE.tasks,
    embed=_embed_eurobert,
    blocks=lambda base: base.layers,
    whole=_whole,
    halves=_halves_eurobert,
    tail=("norm",),
    fp32_masked_loss=True,
)
FAMILIES: dict[str, Family] = {
    "modernbert": Family(
        inputs=_UNTYPED,
        tasks=TEXT_TASKS,
        embed=_embed_modernbert,
        blocks=lambda base: base.layers,
        whole=_whole,
        halves=_halves_modernbert,
        tail=("final_norm",),
        fp32_masked_loss=True,
    ),
    "eurobert": _EUROBERT,
    "ultrabert": dataclasses.replace(_EUROBERT, tasks=all_but("multiple-choice")),
    "esmc": dataclasses.replace(_EUROBERT, halves=_halves_esmc),
    "openai_privacy_filter": dataclasses.replace(
        _EUROBERT,
        tasks=("token-classification",),
        whole=_whole_windowed,
        halves=_halves_windowed,
        fp32_token_loss=True,
    ),
    "roformer": Family(
        inputs=_GTE.inputs,
        tasks=TEXT_TASKS,
        embed=_embed_roformer,
        blocks=lambda base: base.encoder.layer,
        whole=_whole_roformer,
        halves=_halves_roformer,
    ),
    "gte": _GTE,
    "nomic_bert": _GTE,
    "jina_embeddings_v3": dataclasses.replace(_GTE, tasks=all_but("multiple-choice")),
    "esm": Family(
        inputs=_UNTYPED,
        tasks=_GTE.tasks,
        embed=_embed_esm,
        blocks=lambda base: base.encoder.layer,
        whole=_whole_esm,
        halves=_halves_esm,
        tail=(
            "encoder.emb_layer_norm_after",
            "pooler",
            "contact_head",
            "rotary_embeddings",
        ),
    ),
}
