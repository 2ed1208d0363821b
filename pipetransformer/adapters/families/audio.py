"""Models of spectrograms: the Audio Spectrogram Transformer, Whisper's encoder."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.adapters.families.heads import (
    Tail,
    TailHead,
    check_config,
)
from pipetransformer.adapters.families.parts import Block, Embed, Family, call_block
from pipetransformer.adapters.families.vision import halves_vit, whole_vit

# -- Audio Spectrogram Transformer -----------------------------------------------


def _call_spectrogram(own: Any, values: Tensor) -> Any:
    return own.embeddings(values)


def _embed_spectrogram(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_spectrogram, mask=None)


def _finish_spectrogram(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden = own.layernorm(hidden)
    return hidden, (hidden[:, 0] + hidden[:, 1]) / 2


def _head_spectrogram(model: Any) -> nn.Module:
    tail = Tail({"layernorm": model.base_model.layernorm}, _finish_spectrogram)
    return TailHead(model, model.base_model_prefix, tail)


_SPECTROGRAM = Family(
    inputs=("input_values",),
    tasks=("audio-classification",),
    embed=_embed_spectrogram,
    blocks=lambda base: base.layers,
    whole=whole_vit,
    halves=halves_vit,
    head=_head_spectrogram,
    ragged=False,
)

# -- Whisper: its encoder --------------------------------------------------------


def _call_whisper_embeddings(own: Any, features: Tensor, dropout: float) -> Any:
    table = own.embed_positions
    frames = table.num_embeddings * own.conv1.stride[0] * own.conv2.stride[0]
    if features.shape[-1] != frames:
        raise ValueError(
            f"input_features: expected {frames} frames, got {features.shape[-1]}"
        )
    value = functional.gelu(own.conv2(functional.gelu(own.conv1(features))))
    places = torch.arange(table.num_embeddings, device=value.device)
    value = value.permute(0, 2, 1) + table(places)
    return functional.dropout(value, p=dropout, training=own.training)


def _attend_whisper(
    own: Any, hidden: Tensor, mask: Tensor | None, dropout: float
) -> Any:
    value = own.attention(own.norm(hidden), attention_mask=mask)[0]
    return hidden + functional.dropout(value, p=dropout, training=own.training)


def _feed_whisper(
    own: Any, hidden: Tensor, _: Tensor | None, dropout: float, inner: float
) -> Any:
    value = own.activation(own.fc1(own.norm(hidden)))
    value = own.fc2(functional.dropout(value, p=inner, training=own.training))
    value = hidden + functional.dropout(value, p=dropout, training=own.training)
    if value.dtype == torch.float16:
        most = torch.finfo(value.dtype).max - 1000
        value = value.clamp(-most, most)
    return value


def _embed_whisper(model: Any) -> Embed:
    base, config = model.encoder, model.config
    check_config(config, encoder_layerdrop=0.0, use_weighted_layer_sum=False)
    names = ("conv1", "conv2", "embed_positions")
    parts = {name: getattr(base, name) for name in names}
    call = functools.partial(_call_whisper_embeddings, dropout=config.dropout)
    return Embed(parts, call, mask=None)


def _whole_whisper(_: Any, block: Any, __: int) -> Block:
    return Block({"block": block}, call_block, None)


def _halves_whisper(model: Any, block: Any, _: int) -> tuple[Block, Block]:
    drops = {"dropout": model.config.dropout}
    first = {"norm": block.self_attn_layer_norm, "attention": block.self_attn}
    second = {
        "norm": block.final_layer_norm,
        "fc1": block.fc1,
        "activation": block.activation_fn,
        "fc2": block.fc2,
    }
    attend = functools.partial(_attend_whisper, **drops)
    inner = model.config.activation_dropout
    feed = functools.partial(_feed_whisper, **drops, inner=inner)
    return Block(first, attend, None), Block(second, feed, None)


def _finish_whisper(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return own.layer_norm(hidden), None


def _head_whisper(model: Any) -> nn.Module:
    tail = Tail({"layer_norm": model.encoder.layer_norm}, _finish_whisper)
    return TailHead(model, "encoder", tail)


_WHISPER = Family(
    inputs=("input_features",),
    tasks=("audio-classification",),
    embed=_embed_whisper,
    blocks=lambda model: model.encoder.layers,
    whole=_whole_whisper,
    halves=_halves_whisper,
    head=_head_whisper,
    ragged=False,
)

FAMILIES: dict[str, Family] = {"audio-spectrogram-transformer": _SPECTROGRAM}
BY_CLASS: dict[str, Family] = {"WhisperForAudioClassification": _WHISPER}
"""Families by the class of the task model, where others of its kind are cut apart."""
