"""Encoders of text: those of BERT's form, and all by their ``model_type``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families import relative_encoders, rotary_encoders
from pipetransformer.adapters.families.encoder_parts import TEXT_TASKS, all_but
from pipetransformer.adapters.families.heads import check_config, unused
from pipetransformer.adapters.families.parts import Attention, Block, Embed, Family

# -- BERT and its like -----------------------------------------------------------


def _call_bert_embeddings(own: Any, input_ids: Tensor, token_types: Tensor) -> Any:
    value = own.embeddings(input_ids=input_ids, token_type_ids=token_types)
    return own.project(value) if hasattr(own, "project") else value


def _call_embeddings(own: Any, input_ids: Tensor) -> Any:
    return own.embeddings(input_ids=input_ids)


def _call_bert(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    value = own.block(hidden, attention_mask=mask)
    return value[0] if isinstance(value, tuple) else value


def _attend_bert(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    value = own.attention(hidden, mask)
    return value[0] if isinstance(value, tuple) else value


def _feed_bert(own: Any, hidden: Tensor, _: Tensor | None, size: int) -> Any:
    from transformers.pytorch_utils import apply_chunking_to_forward

    def one(chunk: Tensor) -> Any:
        taken = own.norm(chunk) if hasattr(own, "norm") else chunk
        return own.output(own.intermediate(taken), chunk)

    return apply_chunking_to_forward(one, size, 1, hidden)


def _embed_bert(base: Any) -> Embed:
    parts = {"embeddings": base.embeddings}
    if hasattr(base, "embeddings_project"):  # of ELECTRA
        parts["project"] = base.embeddings_project
    if hasattr(base.encoder, "embedding_hidden_mapping_in"):  # of RemBERT
        parts["project"] = base.encoder.embedding_hidden_mapping_in
    return Embed(parts, _call_bert_embeddings, mask=1)


def _embed_tokens(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_embeddings, mask=1)


def _whole_bert(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, _call_bert, Attention(base.config, "bidirectional"))


def _halves_bert(
    base: Any, block: Any, _: int, norm: str | None = None
) -> tuple[Block, Block]:
    feed = functools.partial(_feed_bert, size=block.chunk_size_feed_forward)
    first = {"attention": block.attention}
    second: dict[str, nn.Module] = {
        "intermediate": block.intermediate,
        "output": block.output,
    }
    if norm is not None:
        second["norm"] = getattr(block, norm)
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


# -- BigBird, without its sparse attention; MobileBERT ---------------------------


def _embed_big_bird(base: Any) -> Embed:
    # The blocks' own, which a call may have changed since the config was read.
    check_config(base, attention_type="original_full")
    unused(base.pooler)  # multiple choice alone would read it
    return _embed_bert(base)


_BERT = Family(
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    tasks=TEXT_TASKS,
    embed=_embed_bert,
    blocks=lambda base: base.encoder.layer,
    whole=_whole_bert,
    halves=_halves_bert,
    tail=("pooler",),
)
_ROBERTA = dataclasses.replace(
    _BERT, inputs=("input_ids", "attention_mask"), embed=_embed_tokens
)
FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "big_bird": dataclasses.replace(
        _BERT,
        tasks=all_but("question-answering", "multiple-choice"),
        embed=_embed_big_bird,
    ),
    "camembert": _ROBERTA,
    "convbert": dataclasses.replace(_BERT, tail=(), ragged=False),
    "data2vec-text": _ROBERTA,
    "distilbert": dataclasses.replace(
        _ROBERTA,
        blocks=lambda base: base.transformer.layer,
        halves=_halves_distilbert,
        tail=(),
    ),
    "electra": _BERT,
    "ernie": _BERT,
    "megatron-bert": dataclasses.replace(
        _BERT,
        halves=functools.partial(_halves_bert, norm="ln"),
        tail=("encoder.ln", "pooler"),
    ),
    "mobilebert": dataclasses.replace(_BERT, halves=None, ragged=False),
    "rembert": _BERT,
    "roberta": _ROBERTA,
    "roberta-prelayernorm": dataclasses.replace(_ROBERTA, tail=("LayerNorm", "pooler")),
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": dataclasses.replace(
        _ROBERTA,
        halves=functools.partial(_halves_bert, norm="LayerNorm"),
        tail=("encoder.LayerNorm", "pooler"),
    ),
    **relative_encoders.FAMILIES,
    **rotary_encoders.FAMILIES,
}


def refusal(model: Any) -> str | None:
    """Say why a model cannot be cut, as ``expected ..., got ...``; None: it may be."""
    config, name = model.config, type(model).__name__
    if config.model_type == "albert":
        return (
            "expected blocks with weights of their own, got albert, whose blocks are "
            f"{config.num_hidden_groups} that run {config.num_hidden_layers} times in "
            "all: nothing of them can freeze alone or be on another stage"
        )
    masks = name.startswith("Deberta") and name.endswith("ForMaskedLM")
    if masks and not config.legacy:
        return (
            "expected config.legacy=True of a DeBERTa for masked-lm, got False, whose "
            "head reads the weight of the embeddings"
        )
    return None
