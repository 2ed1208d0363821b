"""Models of spectrograms, and conformers: of waves, and of spectrograms as well."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.adapters.families.heads import (
    Tail,
    TailHead,
    check_config,
    keep,
    unused,
)
from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    call_block,
)
from pipetransformer.adapters.families.vision import halves_vit, whole_vit
from pipetransformer.adapters.families.waves import (
    WaveHead,
    check_drawn,
    embed_waves,
)

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

# -- Wav2Vec2-BERT, Wav2Vec2-Conformer -------------------------------------------


class _ConformerBlock(Block):
    """A layer of a conformer.

    Args:
        base: The base model.
        parts: As of a `Block`.
        call: Takes the layer, hidden states and what its parts take besides.
        attends: Whether it has the block's attention.
        masked: Whether it has the block's convolution, and that takes a mask.
    """

    def __init__(
        self, base: Any, parts: Any, call: Any, *, attends: bool, masked: bool
    ) -> None:
        make = Attention(base.config, "bidirectional") if attends else None
        super().__init__(parts, call, make)
        places = base.encoder.embed_positions if attends else None
        self._places = None if places is None else type(places)
        # It follows from the config: each layer has its own.
        found = getattr(places, "inv_freq", None)
        own = None if found is None else found.detach().clone()
        self.register_buffer("inv_freq", own, persistent=False)
        self._masked = masked

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """Run the block; the mask of the frames is handed on as it is."""
        extra: dict[str, Any] = {}
        if self._masked:
            extra["conv_attention_mask"] = padding
        if self.attention_mask is not None and padding is not None:
            extra["attention_mask"] = self.attention_mask.mask(hidden, padding)
            # Made once per micro-batch and stage, as the mask is.
            made = padding.__dict__.setdefault("_masks", {})
            if ("places", hidden.dtype) not in made:
                made["places", hidden.dtype] = self._place(hidden.detach())
            extra["relative_position_embeddings"] = made["places", hidden.dtype]
        return self._call(self, hidden, **extra), padding

    def _place(self, hidden: Tensor) -> Any:
        kind: Any = self._places
        if kind is None:
            return None
        own = types.SimpleNamespace(
            d_model=hidden.shape[-1],
            pe=None,
            inv_freq=self.inv_freq,
            cached_sequence_length=None,
            cached_rotary_positional_embedding=None,
        )
        if hasattr(kind, "extend_pe"):
            width = types.SimpleNamespace(d_model=own.d_model)
            own.extend_pe = functools.partial(kind.extend_pe, width)
        return kind.forward(own, hidden)


def _call_conformer(own: Any, hidden: Tensor, **extra: Any) -> Any:
    value = own.block(hidden, **extra)
    return value[0] if isinstance(value, tuple) else value


def _attend_conformer(own: Any, hidden: Tensor, **extra: Any) -> Any:
    hidden = own.feed(own.feed_norm(hidden)) * 0.5 + hidden
    return own.dropout(own.attention(own.norm(hidden), **extra)[0]) + hidden


def _feed_conformer(own: Any, hidden: Tensor, **extra: Any) -> Any:
    mask = extra.get("conv_attention_mask")
    masks = {} if mask is None else {"attention_mask": mask}
    hidden = hidden + own.convolution(hidden, **masks)
    hidden = own.feed(own.feed_norm(hidden)) * 0.5 + hidden
    return own.norm(hidden)


def _is_masked(base: Any) -> bool:
    return bool(base.config.model_type == "wav2vec2-bert")


def _whole_conformer(base: Any, block: Any, _: int) -> Block:
    parts, masked = {"block": block}, _is_masked(base)
    return _ConformerBlock(base, parts, _call_conformer, attends=True, masked=masked)


def _halves_conformer(base: Any, block: Any, _: int) -> tuple[Block, ...]:
    first = {
        "feed_norm": block.ffn1_layer_norm,
        "feed": block.ffn1,
        "norm": block.self_attn_layer_norm,
        "attention": block.self_attn,
        "dropout": block.self_attn_dropout,
    }
    second = {
        "convolution": block.conv_module,
        "feed_norm": block.ffn2_layer_norm,
        "feed": block.ffn2,
        "norm": block.final_layer_norm,
    }
    attend, feed, masked = _attend_conformer, _feed_conformer, _is_masked(base)
    return (
        _ConformerBlock(base, first, attend, attends=True, masked=False),
        _ConformerBlock(base, second, feed, attends=False, masked=masked),
    )


class _Features(Embed):
    """The layer that projects the features of frames; those of padding become zeros.

    Args:
        base: The base model.
    """

    def __init__(self, base: Any) -> None:
        encoder = base.encoder
        parts = {"projection": base.feature_projection, "dropout": encoder.dropout}
        super().__init__(parts, _project_features, mask=1)
        mask = getattr(base, "masked_spec_embed", None)
        unused(mask)
        self.register_parameter("masked_spec_embed", mask)

    def forward(self, *tensors: Tensor) -> Any:
        """Return hidden states and the frames' mask, bool."""
        values, mask = tensors
        there = mask.bool()
        return self._call(self, values, there), there.view_as(there)


def _project_features(own: Any, values: Tensor, there: Tensor) -> Any:
    hidden = own.projection(values)[0]
    return own.dropout(hidden.masked_fill(~there.unsqueeze(-1), 0.0))


class _WaveFeatures(_Features):
    """The same behind the convolutions of waves.

    Args:
        base: The base model.
    """

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        # No forward calls it.
        self.add_module("positions", base.encoder.pos_conv_embed)
        unused(base.encoder.pos_conv_embed)
        # For its state alone.
        self.add_module("places", base.encoder.embed_positions)


def _embed_bert(base: Any) -> Embed:
    check_drawn(base)
    return _Features(base)


def _head_bert(model: Any) -> nn.Module:
    return WaveHead(model, Tail({}, keep))


def _complete_bert(_: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if "attention_mask" in batch or "input_features" not in batch:
        return batch
    values = batch["input_features"]
    there = torch.ones(values.shape[:2], dtype=torch.long, device=values.device)
    return {**batch, "attention_mask": there}


_BERT = Family(
    inputs=("input_features", "attention_mask"),
    tasks=("sequence-classification", "ctc"),
    embed=_embed_bert,
    blocks=lambda base: base.encoder.layers,
    whole=_whole_conformer,
    halves=_halves_conformer,
    head=_head_bert,
    complete=_complete_bert,
)


def _whole_of_waves(base: Any, block: Any, index: int) -> nn.Module:
    return (
        _WaveFeatures(base) if block is None else _whole_conformer(base, block, index)
    )


def _halves_of_waves(base: Any, block: Any, index: int) -> tuple[nn.Module, ...]:
    if block is None:
        return (_WaveFeatures(base),)
    return _halves_conformer(base, block, index)


def _finish_conformer(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return own.norm(hidden), None


def _head_conformer(model: Any) -> nn.Module:
    parts = {"norm": model.base_model.encoder.layer_norm}
    return WaveHead(model, Tail(parts, _finish_conformer))


_CONFORMER = dataclasses.replace(
    _BERT,
    inputs=("input_values", "attention_mask"),
    embed=embed_waves,
    # The first "block" stands for what precedes them.
    blocks=lambda base: [None, *base.encoder.layers],
    whole=_whole_of_waves,
    halves=_halves_of_waves,
    head=_head_conformer,
    complete=None,
    ragged=False,
)

FAMILIES: dict[str, Family] = {
    "audio-spectrogram-transformer": _SPECTROGRAM,
    "wav2vec2-bert": _BERT,
    "wav2vec2-conformer": _CONFORMER,
}
BY_CLASS: dict[str, Family] = {"WhisperForAudioClassification": _WHISPER}
"""Families by the class of the task model, where others of its kind are cut apart."""
