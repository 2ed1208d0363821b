"""Models of raw waves: Wav2Vec2, HuBERT, UniSpeech, data2vec, WavLM and SEW.

The layers: convolutions, which make frames of samples; projection and positions of the
frames; blocks; head. Between them travel hidden states ``(rows, frames, width)`` and
the mask of the frames ``(rows, frames)``, True where they are valid, which the first
layer makes of the samples' mask.
"""

from __future__ import annotations

import dataclasses
import functools
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
from pipetransformer.adapters.families.parts import Attention, Block, Embed, Family


class _Waves(Embed):
    """The first layer: from samples and their mask to features of frames.

    Args:
        base: The base model.
    """

    def __init__(self, base: Any) -> None:
        config = base.config
        super().__init__({"features": base.feature_extractor}, _call_features, mask=1)
        self._steps = tuple(zip(config.conv_kernel, config.conv_stride, strict=True))

    def forward(self, *tensors: Tensor) -> Any:
        """Return features ``(rows, frames, channels)`` and the frames' mask, bool."""
        values, mask = tensors
        hidden = self._call(self, values)
        return hidden, _frames(mask.bool(), hidden.shape[1], self._steps)


def _call_features(own: Any, values: Tensor) -> Any:
    # Its own forward asks for the gradient of the samples, which nobody needs.
    value = values[:, None]
    for layer in own.features.conv_layers:
        value = layer(value)
    return value.transpose(1, 2)


def _frames(mask: Tensor, frames: int, steps: tuple[tuple[int, int], ...]) -> Tensor:
    """Return which frames are of valid samples alone, as the models count them."""
    lengths = mask.sum(-1)
    for kernel, stride in steps:
        lengths = torch.div(lengths - kernel, stride, rounding_mode="floor") + 1
    ends = torch.zeros(len(mask), frames, dtype=torch.long, device=mask.device)
    ends[torch.arange(len(mask), device=mask.device), lengths - 1] = 1
    return ends.flip([-1]).cumsum(-1).flip([-1]).bool()


class _Positions(Block):
    """The layer behind: projects the features and adds where they are.

    Args:
        base: The base model.
    """

    def __init__(self, base: Any) -> None:
        squeezes = _squeezes(base)
        parts = _squeezed_parts(base) if squeezes else _placed_parts(base)
        super().__init__(parts, _place_squeezed if squeezes else _place, None)
        mask = getattr(base, "masked_spec_embed", None)
        unused(mask)
        self.register_parameter("masked_spec_embed", mask)

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """Return what the blocks take; frames that are padding are zeros at first."""
        return self._call(self, hidden, padding), padding


def _placed_parts(base: Any) -> dict[str, nn.Module]:
    encoder = base.encoder
    parts = {
        "projection": base.feature_projection,
        "positions": encoder.pos_conv_embed,
        "dropout": encoder.dropout,
    }
    if not _is_stable(base):
        parts["norm"] = encoder.layer_norm
    return parts


def _place(own: Any, hidden: Tensor, padding: Tensor) -> Any:
    value = own.projection(hidden)
    value = value[0] if isinstance(value, tuple) else value
    value[~padding.unsqueeze(-1).repeat(1, 1, value.shape[2])] = 0
    value = value + own.positions(value)
    return own.dropout(own.norm(value) if hasattr(own, "norm") else value)


def _is_stable(base: Any) -> bool:
    # data2vec-audio has one form, whatever its config says.
    return type(base.encoder).__name__.endswith("StableLayerNorm")


def check_drawn(base: Any) -> None:
    """Refuse what a model of sound draws for a whole batch, or reads across layers."""
    config = base.config
    # Masks are drawn for a whole batch, with numpy; layers are left out.
    if config.mask_time_prob > 0 or config.mask_feature_prob > 0:
        check_config(config, apply_spec_augment=False)
    check_config(config, layerdrop=0.0, use_weighted_layer_sum=False, add_adapter=False)


def embed_waves(base: Any) -> Embed:
    """Make the first layer."""
    check_drawn(base)
    return _Waves(base)


def _call_wave_block(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    value = own.block(hidden, attention_mask=mask)
    return value[0] if isinstance(value, tuple) else value


def _attend_late(own: Any, hidden: Tensor, **extra: Any) -> Any:
    """Attend to the hidden states, then normalise."""
    value = own.attention(hidden, **extra)[0]
    return own.norm(hidden + own.dropout(value))


def _attend_early(own: Any, hidden: Tensor, **extra: Any) -> Any:
    """Normalise, then attend."""
    return hidden + own.dropout(own.attention(own.norm(hidden), **extra)[0])


def _attend_masked(own: Any, hidden: Tensor, mask: Tensor | None, attend: Any) -> Any:
    return attend(own, hidden, attention_mask=mask)


def _feed_late(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.norm(hidden + own.feed_forward(hidden))


def _feed_early(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    hidden = hidden + own.feed_forward(own.norm(hidden))
    return hidden + own.adapter(hidden) if hasattr(own, "adapter") else hidden


def _parts_of(block: Any) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    first = {
        "attention": block.attention,
        "dropout": block.dropout,
        "norm": block.layer_norm,
    }
    second = {"feed_forward": block.feed_forward, "norm": block.final_layer_norm}
    if getattr(block, "adapter_layer", None) is not None:
        second["adapter"] = block.adapter_layer
    return first, second


def _whole_waves(base: Any, block: Any, index: int) -> Block:
    if index == 0:
        return _Positions(base)
    return Block({"block": block}, _call_wave_block, _attention_of(base))


def _halves_waves(base: Any, block: Any, index: int) -> tuple[Block, ...]:
    if index == 0:
        return (_Positions(base),)
    stable = _is_stable(base)
    first, second = _parts_of(block)
    attend = functools.partial(
        _attend_masked, attend=_attend_early if stable else _attend_late
    )
    feed = _feed_early if stable else _feed_late
    return Block(first, attend, _attention_of(base)), Block(second, feed, None)


def _attention_of(base: Any) -> Attention:
    kind = _SqueezedAttention if _squeezes(base) else Attention
    return kind(base.config, "bidirectional")


class WaveHead(TailHead):
    """The last layer of a model of waves, which gets the mask of frames as well.

    Args:
        model: The task model.
        tail: In place of its base model.
    """

    def __init__(self, model: Any, tail: Tail) -> None:
        super().__init__(model, model.base_model_prefix, tail)
        self.model._get_feature_vector_attention_mask = _as_given
        self._recognises = type(model).__name__.endswith("ForCTC")
        if self._recognises:
            check_config(model.config, ctc_loss_reduction="mean")  # else a sum of rows

    def forward(self, hidden: Tensor, padding: Tensor | None = None, *_: Tensor) -> Any:
        """Return the logits ``(rows, classes)``, from the mean over valid frames.

        Of CTC: the logits ``(rows, frames, words)``, and how many frames of each row
        are valid, ``(rows,)``.
        """
        found = self.model(hidden, attention_mask=padding, return_dict=True).logits
        frames: Any = padding
        return (found, frames.sum(1)) if self._recognises else found


def _head_waves(model: Any) -> nn.Module:
    base = model.base_model
    if _squeezes(base):
        return _SqueezedHead(model)
    stable = _is_stable(base)
    parts = {"norm": base.encoder.layer_norm} if stable else {}
    return WaveHead(model, Tail(parts, _finish_stable if stable else keep))


def _finish_stable(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return own.norm(hidden), None


def _as_given(_: int, mask: Tensor) -> Tensor:
    # The mask is already of frames.
    return mask


_WAVES = Family(
    inputs=("input_values", "attention_mask"),
    tasks=("sequence-classification", "ctc"),
    embed=embed_waves,
    # The first "block" stands for what precedes them.
    blocks=lambda base: [None, *base.encoder.layers],
    whole=_whole_waves,
    halves=_halves_waves,
    head=_head_waves,
    # Its lengths are of samples, while frames travel between layers.
    ragged=False,
)

# -- SEW: blocks get the mean of some frames in a row, the head all of them -------


class _SqueezedAttention(Attention):
    """Attention to means of frames, while the mask is of frames."""

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        """Make the mask; a mean is valid if any of its frames is."""
        step = self.config.squeeze_factor
        found = functional.max_pool1d(there.float().unsqueeze(1), step, step)
        return super().make(hidden, found.squeeze(1).bool(), **more)


class _SqueezedHead(WaveHead):
    """The last layer, which makes frames again.

    Args:
        model: The task model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, Tail({}, keep))
        self.upsample = model.base_model.encoder.upsample

    def forward(self, hidden: Tensor, padding: Tensor | None = None, *_: Tensor) -> Any:
        """Return what every model of waves does."""
        hidden, frames = self.upsample(hidden), padding
        if frames is not None and hidden.shape[1] < frames.shape[1]:
            missing = frames.shape[1] - hidden.shape[1]
            hidden = functional.pad(hidden, (0, 0, 0, missing))
        return super().forward(hidden, padding)


def _squeezes(base: Any) -> bool:
    return hasattr(base.encoder, "upsample")


def _squeezed_parts(base: Any) -> dict[str, nn.Module]:
    encoder = base.encoder
    parts = {
        "first_norm": base.layer_norm,
        "first_dropout": base.feature_dropout,
        "positions": encoder.pos_conv_embed,
        "pool": encoder.pool,
        "norm": encoder.layer_norm,
        "dropout": encoder.dropout,
    }
    if base.project_features:
        parts["projection"] = base.feature_projection
    return parts


def _place_squeezed(own: Any, hidden: Tensor, padding: Tensor) -> Any:
    value = own.first_norm(hidden)
    if hasattr(own, "projection"):
        value = own.projection(value)
    value = own.first_dropout(value)
    value[~padding.unsqueeze(-1).repeat(1, 1, value.shape[2])] = 0
    value = value.transpose(1, 2)
    placed, pooled = own.positions(value), own.pool(value)
    length = min(placed.shape[-1], pooled.shape[-1])
    value = (pooled[..., :length] + placed[..., :length]).transpose(1, 2)
    return own.dropout(own.norm(value))


# -- WavLM: a bias by distance, whose table is the first block's ------------------
#
# It travels with the hidden states, (rows, 2 frames - 1, heads), a copy for each row:
# far less than the bias of all pairs of frames that the model hands on.


class _WavLMBlock(Block):
    """A layer of WavLM.

    Args:
        parts: As of a `Block`.
        call: Takes the layer, hidden states and what the attention takes besides.
        attends: Whether it has the block's attention.
    """

    def __init__(self, parts: Any, call: Any, *, attends: bool) -> None:
        super().__init__(parts, call, None)
        self._attends = attends

    def forward(
        self,
        hidden: Tensor,
        padding: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Any:
        """Run the block; mask and table are handed on, by the first one made."""
        if table is None:
            table = _make_table(self._attention(), hidden)
        extra: dict[str, Any] = {}
        if self._attends:
            extra["attention_mask"] = padding
            extra["position_bias"] = _bias(table[0], *hidden.shape[:2])
        return self._call(self, hidden, **extra), padding, table

    def _attention(self) -> Any:
        block = self._modules.get("block")
        return self.get_submodule("attention" if block is None else "block.attention")


def _make_table(attention: Any, hidden: Tensor) -> Tensor:
    rows, frames = hidden.shape[:2]
    distances = torch.arange(1 - frames, frames, device=hidden.device)
    buckets = attention._relative_positions_bucket(distances)
    table: Tensor = attention.rel_attn_embed(buckets)
    return table.expand(rows, *table.shape)


def _bias(table: Tensor, rows: int, frames: int) -> Tensor:
    places = torch.arange(frames, device=table.device)
    bias = table[places[None] - places[:, None] + frames - 1].permute(2, 0, 1)
    return bias.unsqueeze(0).repeat(rows, 1, 1, 1).view(-1, frames, frames)


def _call_wavlm(own: Any, hidden: Tensor, **extra: Any) -> Any:
    return own.block(hidden, **extra)[0]


def _whole_wavlm(base: Any, block: Any, index: int) -> Block:
    if index == 0:
        return _Positions(base)
    return _WavLMBlock({"block": block}, _call_wavlm, attends=True)


def _halves_wavlm(base: Any, block: Any, index: int) -> tuple[Block, ...]:
    if index == 0:
        return (_Positions(base),)
    stable = _is_stable(base)
    first, second = _parts_of(block)
    attend = _attend_early if stable else _attend_late
    feed = functools.partial(_feed_early if stable else _feed_late, _=None)
    return (
        _WavLMBlock(first, attend, attends=True),
        _WavLMBlock(second, feed, attends=False),
    )


_WAVLM = dataclasses.replace(_WAVES, whole=_whole_wavlm, halves=_halves_wavlm)

FAMILIES: dict[str, Family] = {
    "wav2vec2": _WAVES,
    "hubert": _WAVES,
    "unispeech": _WAVES,
    "unispeech-sat": _WAVES,
    "data2vec-audio": _WAVES,
    "sew": _WAVES,
    "wavlm": _WAVLM,
}
