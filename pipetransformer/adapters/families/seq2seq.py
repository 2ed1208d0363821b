"""BART and its relatives, and Whisper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.adapters.families.parts import Family
from pipetransformer.adapters.families.seq2seq_batches import (
    SPEECH,
    SPEECH_PADDING,
    TEXT,
    TEXT_PADDING,
    completed,
    rotated,
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


def _check(base: Any) -> None:
    """Refuse what would not train as in the model.

    Raises:
        ValueError: blocks that are left out at random, or masks drawn over features.
    """
    drops = [stack.layerdrop for stack in (base.encoder, base.decoder)]
    if any(drops):
        raise ValueError(
            "model: expected no LayerDrop, which leaves whole blocks out at random, "
            f"got {drops[0]} in the encoder and {drops[1]} in the decoder; load it "
            "with encoder_layerdrop=0.0, decoder_layerdrop=0.0"
        )
    if getattr(base.config, "apply_spec_augment", False):
        raise ValueError(
            "model: expected no SpecAugment, whose draws no run repeats, got "
            "config.apply_spec_augment=True; set it to False, and augment features in "
            "the dataset"
        )


def _hollow(stack: Any) -> Any:
    """Return an encoder or decoder that embeds and does nothing else."""
    norm = {"layer_norm": nn.Identity()} if hasattr(stack, "layer_norm") else {}
    return replaced(stack, layers=nn.ModuleList(), **norm)


def _call_encoder(own: Any, inputs: Tensor) -> Any:
    if inputs.is_floating_point():
        inputs = inputs.to(own.encoder.conv1.weight.dtype)
    return own.encoder(inputs, return_dict=True).last_hidden_state


def _call_decoder(own: Any, ids: Tensor) -> Any:
    found = own.decoder(input_ids=ids, use_cache=False, return_dict=True)
    return found.last_hidden_state


def _call_encoder_block(own: Any, hidden: Tensor, mask: Any, _: Any) -> Any:
    return own.block(hidden, mask)


def _call_decoder_block(
    own: Any, hidden: Tensor, mask: Any, source: Tensor, cross: Any, _: Any
) -> Any:
    return own.block(
        hidden,
        attention_mask=mask,
        encoder_hidden_states=source,
        encoder_attention_mask=cross,
        use_cache=False,
    )


def _embed_bart(base: Any) -> Any:
    _check(base)
    share_with_encoder(base)
    return Start({"encoder": _hollow(base.encoder)}, _call_encoder)


def _blocks_bart(base: Any) -> Sequence[Any]:
    return [*base.encoder.layers, base.decoder, *base.decoder.layers]


def _bridge_bart(base: Any) -> Bridge:
    return Bridge({"decoder": _hollow(base.decoder)}, _call_decoder)


def _after_bart(encoder: Any, block: Any) -> dict[str, nn.Module]:
    """Return what the encoder does behind a block, if it is the last one."""
    is_last = block is encoder.layers[-1]
    return {"end": encoder.layer_norm} if is_last and _has_norm(encoder) else {}


def _has_norm(stack: Any) -> bool:
    return hasattr(stack, "layer_norm")


def _whole_bart(base: Any, block: Any, index: int) -> Any:
    if block is base.decoder:
        return _bridge_bart(base)
    if index < len(base.encoder.layers):
        parts = {"block": block, **_after_bart(base.encoder, block)}
        return EncoderBlock(parts, _call_encoder_block, base.config)
    return DecoderBlock({"block": block}, _call_decoder_block, base.config)


def _halves_bart(base: Any, block: Any, index: int, normed_first: bool) -> Any:
    """Make two layers of a block.

    Args:
        base: The base model.
        block: One of `_blocks_bart`.
        index: Its place there.
        normed_first: Norms stand before attention and MLP, not behind what they add to.
    """
    if block is base.decoder:
        return (_bridge_bart(base),)
    first = {"attn": block.self_attn, "attn_norm": block.self_attn_layer_norm}
    second = {
        "fc1": block.fc1,
        "act": block.activation_fn,
        "fc2": block.fc2,
        "norm": block.final_layer_norm,
    }
    step = functools.partial(_add, dropout=block.dropout, normed_first=normed_first)
    feed = functools.partial(_feed, step=step, dropout=block.activation_dropout)
    if index < len(base.encoder.layers):
        second |= _after_bart(base.encoder, block)
        closed = functools.partial(_feed_within, feed=feed, always=normed_first)
        attend = functools.partial(_attend, step=step)
        return (
            EncoderBlock(first, attend, base.config),
            EncoderBlock(second, closed, base.config),
        )
    first["cross"] = block.encoder_attn
    first["cross_norm"] = block.encoder_attn_layer_norm
    attend = functools.partial(_attend_both, step=step)
    return (
        DecoderBlock(first, attend, base.config),
        DecoderBlock(second, feed, base.config),
    )


def _add(
    own: Any,
    hidden: Tensor,
    norm: nn.Module,
    call: Callable[[Tensor], Tensor],
    dropout: float,
    normed_first: bool,
) -> Tensor:
    """Add to hidden states what `call` makes of them."""
    value = call(norm(hidden) if normed_first else hidden)
    value = hidden + functional.dropout(value, dropout, own.training)
    return value if normed_first else norm(value)


def _attend(own: Any, hidden: Tensor, mask: Any, *_: Any, step: Any) -> Any:
    def attend(value: Tensor) -> Any:
        return own.attn(value, attention_mask=mask)[0]

    return step(own, hidden, own.attn_norm, attend)


def _attend_both(
    own: Any, hidden: Tensor, mask: Any, source: Tensor, cross: Any, _: Any, step: Any
) -> Any:
    def attend(value: Tensor) -> Any:
        return own.cross(value, key_value_states=source, attention_mask=cross)[0]

    hidden = _attend(own, hidden, mask, step=step)
    return step(own, hidden, own.cross_norm, attend)


def _feed(own: Any, hidden: Tensor, *_: Any, step: Any, dropout: float) -> Any:
    def feed(value: Tensor) -> Any:
        value = own.act(own.fc1(value))
        return own.fc2(functional.dropout(value, dropout, own.training))

    return step(own, hidden, own.norm, feed)


def _feed_within(own: Any, hidden: Tensor, *_: Any, feed: Any, always: bool) -> Any:
    """Keep fp16 within its range, as encoders do."""
    value: Tensor = feed(own, hidden)
    if value.dtype == torch.float16 and (always or not value.isfinite().all()):
        most = torch.finfo(value.dtype).max - 1000
        value = value.clamp(-most, most)
    return value


def _head_bart(model: Any) -> nn.Module:
    decoder = model.base_model.decoder
    ends = [decoder.layer_norm] if _has_norm(decoder) else []
    decoded = Decoded(ends, "Seq2SeqModelOutput")
    return Seq2SeqHead(replaced(model, **{model.base_model_prefix: decoded}))


_BART = Family(
    inputs=TEXT,
    tasks=("seq2seq-lm",),
    embed=_embed_bart,
    blocks=_blocks_bart,
    whole=_whole_bart,
    halves=functools.partial(_halves_bart, normed_first=False),
    complete=functools.partial(completed, shifted, ()),
    untie=untie_seq2seq,
    head=_head_bart,
    padding=TEXT_PADDING,
)
_PEGASUS = dataclasses.replace(
    _BART, halves=functools.partial(_halves_bart, normed_first=True)
)
_ROTATED = functools.partial(completed, rotated, ())
_WHISPER = dataclasses.replace(
    _PEGASUS,
    inputs=SPEECH,
    complete=functools.partial(completed, shifted, ("attention_mask",)),
    padding=SPEECH_PADDING,
)


FAMILIES: dict[str, Family] = {
    "bart": _BART,
    "blenderbot": _PEGASUS,
    "blenderbot-small": _BART,
    "m2m_100": _PEGASUS,
    "marian": _BART,
    "mbart": dataclasses.replace(_PEGASUS, complete=_ROTATED),
    "pegasus": _PEGASUS,
    "plbart": dataclasses.replace(_BART, complete=_ROTATED),
    "whisper": _WHISPER,
}
