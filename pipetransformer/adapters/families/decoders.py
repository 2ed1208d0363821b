"""Causal language models."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    call_block,
    positions,
)

# -- GPT-2 -----------------------------------------------------------------------


def _call_gpt2_embeddings(own: Any, input_ids: Tensor) -> Any:
    value = own.wte(input_ids)
    return own.drop(value + own.wpe(positions(value)))


def _attend(own: Any, hidden: Tensor, mask: Tensor | None, **extra: Any) -> Any:
    return own.attn(own.norm(hidden), attention_mask=mask, **extra)[0] + hidden


def _feed(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return hidden + own.mlp(own.norm(hidden))


def _embed_gpt2(base: Any) -> Embed:
    parts = {"wte": base.wte, "wpe": base.wpe, "drop": base.drop}
    return Embed(parts, _call_gpt2_embeddings, mask=1)


def _whole_gpt2(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, call_block, Attention(base.config, "causal"))


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
    return Block({"block": block}, call_block, make, base.rotary_emb)


def _halves_llama(base: Any, block: Any, index: int) -> tuple[Block, Block]:
    first = {"norm": block.input_layernorm, "attn": block.self_attn}
    second = {"norm": block.post_attention_layernorm, "mlp": block.mlp}
    make = _causal(base, index)
    return Block(first, _attend, make, base.rotary_emb), Block(second, _feed, None)


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
