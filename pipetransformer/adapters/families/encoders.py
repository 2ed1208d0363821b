"""Encoders of text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor

from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    call_block,
)

# -- BERT, RoBERTa, ELECTRA ------------------------------------------------------


def _call_bert_embeddings(own: Any, input_ids: Tensor, token_types: Tensor) -> Any:
    value = own.embeddings(input_ids=input_ids, token_type_ids=token_types)
    return own.project(value) if hasattr(own, "project") else value


def _call_embeddings(own: Any, input_ids: Tensor) -> Any:
    return own.embeddings(input_ids=input_ids)


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
    return Block({"block": block}, call_block, make)


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
}
