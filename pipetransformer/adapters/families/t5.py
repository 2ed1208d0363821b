"""T5 and its relatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.adapters.families.parts import Family
from pipetransformer.adapters.families.seq2seq_batches import (
    T5_PADDING,
    TEXT,
    TEXT_PADDING,
    completed,
    shifted,
)
from pipetransformer.adapters.families.seq2seq_parts import (
    Bridge,
    Decoded,
    DecoderBlock,
    EncoderBlock,
    Seq2SeqHead,
    Start,
    replaced,
    share_with_encoder,
    untie_seq2seq,
)


def _biased(attention: Any, hidden: Tensor, mask: Any, table: Any) -> dict[str, Any]:
    """Return what the first block of a stack would hand on to the others."""
    if table is None:
        return {}
    places = torch.arange(hidden.shape[1], device=hidden.device)
    buckets = attention._relative_position_bucket(
        places - places[:, None],
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias = functional.embedding(buckets, table[0]).permute(2, 0, 1).unsqueeze(0)
    # In older releases of transformers the first block adds the mask as well.
    adds = mask is not None and not hasattr(attention, "scaling")
    return {"position_bias": bias + mask if adds else bias}


def _call_t5_tokens(own: Any, ids: Tensor) -> Any:
    return own.dropout(own.tokens(ids))


def _call_t5_encoder(own: Any, hidden: Tensor, mask: Any, table: Any) -> Any:
    bias = _biased(own.block.layer[0].SelfAttention, hidden, mask, table)
    return _hidden_of(own.block(hidden, attention_mask=mask, **bias))


def _call_t5_decoder(
    own: Any, hidden: Tensor, mask: Any, source: Tensor, cross: Any, table: Any
) -> Any:
    found = own.block(
        hidden,
        attention_mask=mask,
        encoder_hidden_states=source,
        encoder_attention_mask=cross,
        **_biased(own.block.layer[0].SelfAttention, hidden, mask, table),
    )
    return _hidden_of(found)


def _hidden_of(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _attend_t5(own: Any, hidden: Tensor, mask: Any, *others: Any) -> Any:
    bias = _biased(own.attend.SelfAttention, hidden, mask, others[-1])
    return _within_t5(own.attend(hidden, attention_mask=mask, **bias)[0])


def _attend_both_t5(
    own: Any, hidden: Tensor, mask: Any, source: Tensor, cross: Any, table: Any
) -> Any:
    hidden = _attend_t5(own, hidden, mask, table)
    return _within_t5(own.cross(hidden, source, attention_mask=cross)[0])


def _feed_t5(own: Any, hidden: Tensor, *_: Any) -> Any:
    return _within_t5(own.feed(hidden))


def _within_t5(hidden: Tensor) -> Tensor:
    """Keep fp16 within its range, as T5's blocks do."""
    if hidden.dtype == torch.float16:
        most = torch.finfo(hidden.dtype).max
        most = most - 1000 if bool(hidden.isinf().any()) else most
        hidden = hidden.clamp(-most, most)
    return hidden


def _start_of_t5(stack: Any) -> dict[str, nn.Module]:
    parts = {"tokens": stack.embed_tokens, "dropout": _dropout(stack)}
    if _shares_table(stack):
        attention = stack.block[0].layer[0].SelfAttention
        parts["table"] = attention.relative_attention_bias
    return parts


def _shares_table(stack: Any) -> bool:
    """Tell whether the biases of a stack are all in its first block."""
    return bool(stack.config.model_type != "umt5")


def _end_of_t5(stack: Any) -> list[nn.Module]:
    return [stack.final_layer_norm, _dropout(stack)]


def _dropout(stack: Any) -> nn.Module:
    # Each layer has one of its own: layers share no module.
    return nn.Dropout(stack.dropout.p).train(stack.dropout.training)


def _embed_t5(base: Any) -> Any:
    share_with_encoder(base)
    return Start(_start_of_t5(base.encoder), _call_t5_tokens)


def _blocks_t5(base: Any) -> Sequence[Any]:
    return [*base.encoder.block, base.decoder, *base.decoder.block]


def _without_table(stack: Any, block: Any) -> Any:
    """Return a block of a stack whose biases are in the layer that embeds."""
    if block is not stack.block[0] or not _shares_table(stack):
        return block
    first = block.layer[0]
    attention = replaced(first.SelfAttention, relative_attention_bias=None)
    layers = {"0": replaced(first, SelfAttention=attention)}
    return replaced(block, layer=replaced(block.layer, **layers))


def _whole_t5(base: Any, block: Any, index: int) -> Any:
    encoder, decoder = base.encoder, base.decoder
    if block is decoder:
        return Bridge(_start_of_t5(decoder), _call_t5_tokens)
    if index > len(encoder.block):
        parts = {"block": _without_table(decoder, block)}
        return DecoderBlock(parts, _call_t5_decoder, decoder.config)
    parts = {"block": _without_table(encoder, block), **_after_t5(encoder, block)}
    return EncoderBlock(parts, _call_t5_encoder, encoder.config)


def _halves_t5(base: Any, block: Any, index: int) -> Any:
    encoder, decoder = base.encoder, base.decoder
    if block is decoder:
        return (_whole_t5(base, block, index),)
    if index > len(encoder.block):
        attend, cross, feed = _without_table(decoder, block).layer
        first = {"attend": attend, "cross": cross}
        return (
            DecoderBlock(first, _attend_both_t5, decoder.config),
            DecoderBlock({"feed": feed}, _feed_t5, decoder.config),
        )
    attend, feed = _without_table(encoder, block).layer
    second = {"feed": feed, **_after_t5(encoder, block)}
    return (
        EncoderBlock({"attend": attend}, _attend_t5, encoder.config),
        EncoderBlock(second, _feed_t5, encoder.config),
    )


def _after_t5(encoder: Any, block: Any) -> dict[str, nn.Module]:
    """Return what the encoder does behind a block, if it is the last one."""
    is_last = block is encoder.block[-1]
    return {"end": nn.Sequential(*_end_of_t5(encoder))} if is_last else {}


def _head_t5(model: Any) -> nn.Module:
    ends = _end_of_t5(model.decoder)
    decoded = Decoded(ends, "BaseModelOutputWithPastAndCrossAttentions")
    return Seq2SeqHead(replaced(model, shared=None, encoder=None, decoder=decoded))


_T5 = Family(
    inputs=TEXT,
    tasks=("seq2seq-lm",),
    embed=_embed_t5,
    blocks=_blocks_t5,
    whole=_whole_t5,
    halves=_halves_t5,
    complete=functools.partial(completed, shifted, ()),
    untie=untie_seq2seq,
    head=_head_t5,
    padding=T5_PADDING,
)

FAMILIES: dict[str, Family] = {
    "mt5": _T5,
    "t5": _T5,
    "umt5": dataclasses.replace(_T5, padding=TEXT_PADDING),
}
