"""Models of images and videos whose layers keep the number of patches."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.heads import Tail, TailHead, keep, unused
from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    call_block,
)
from pipetransformer.adapters.families.pyramids import NamedTail


def call_alone(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    """Call a whole block that takes the hidden states and nothing else."""
    value = own.block(hidden)
    return value[0] if isinstance(value, tuple) else value


def twice(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a module without weights for both halves: layers share none."""
    return module, copy.deepcopy(module)


# -- ViT, DeiT, ViT-MSN, I-JEPA --------------------------------------------------


def call_vit_embeddings(own: Any, pixels: Tensor) -> Any:
    """Embed the patches of images, in the dtype of the weights."""
    dtype = own.embeddings.patch_embeddings.projection.weight.dtype
    return own.embeddings(pixels.to(dtype))


def _attend_vit(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    return own.dropout(own.attention(own.norm(hidden), mask)[0]) + hidden


def _feed_vit(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.dropout(own.mlp(own.norm(hidden))) + hidden


def _embed_vit(base: Any) -> Embed:
    unused(getattr(base.embeddings, "mask_token", None))
    return Embed({"embeddings": base.embeddings}, call_vit_embeddings, mask=None)


def whole_vit(_: Any, block: Any, __: int) -> Block:
    """Make the layer of a block of ViT."""
    return Block({"block": block}, call_block, None)


def halves_vit(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    """Make both layers of a block of ViT."""
    first = {"norm": block.layernorm_before, "attention": block.attention}
    second = {"norm": block.layernorm_after, "mlp": block.mlp}
    drops = twice(block.dropout)
    return (
        Block({**first, "dropout": drops[0]}, _attend_vit, None),
        Block({**second, "dropout": drops[1]}, _feed_vit, None),
    )


VIT = Family(
    inputs=("pixel_values",),
    tasks=("image-classification",),
    embed=_embed_vit,
    blocks=lambda base: base.layers,
    whole=whole_vit,
    halves=halves_vit,
    tail=("layernorm",),
    ragged=False,
)

# -- DINOv2, with registers or without -------------------------------------------


def _attend_dinov2(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    value = own.attention(own.norm(hidden))
    # A tuple, or of older versions what is in it.
    value = own.scale(value[0] if isinstance(value, tuple) else value)
    return own.drop_path(value) + hidden


def _feed_dinov2(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.drop_path(own.scale(own.mlp(own.norm(hidden)))) + hidden


def _whole_dinov2(_: Any, block: Any, __: int) -> Block:
    return Block({"block": block}, call_alone, None)


def _halves_dinov2(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    drops = twice(block.drop_path)
    first = {
        "norm": block.norm1,
        "attention": block.attention,
        "scale": block.layer_scale1,
        "drop_path": drops[0],
    }
    second = {
        "norm": block.norm2,
        "mlp": block.mlp,
        "scale": block.layer_scale2,
        "drop_path": drops[1],
    }
    return Block(first, _attend_dinov2, None), Block(second, _feed_dinov2, None)


_DINOV2 = dataclasses.replace(
    VIT,
    blocks=lambda base: base.encoder.layer,
    whole=_whole_dinov2,
    halves=_halves_dinov2,
)

# -- CLIP, MetaCLIP 2, SigLIP: their vision towers ---------------------------------


def _call_clip_embeddings(own: Any, pixels: Tensor) -> Any:
    value = own.embeddings(pixels)
    return own.norm(value) if hasattr(own, "norm") else value


def _attend_clip(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    return hidden + own.attention(own.norm(hidden), attention_mask=mask)[0]


def _feed_clip(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return hidden + own.mlp(own.norm(hidden))


def _embed_clip(model: Any) -> Embed:
    base = model.vision_model
    parts = {"embeddings": base.embeddings}
    if hasattr(base, "pre_layrnorm"):
        parts["norm"] = base.pre_layrnorm
    return Embed(parts, _call_clip_embeddings, mask=None)


def _halves_clip(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    first = {"norm": block.layer_norm1, "attention": block.self_attn}
    second = {"norm": block.layer_norm2, "mlp": block.mlp}
    return Block(first, _attend_clip, None), Block(second, _feed_clip, None)


def _head_clip(model: Any) -> nn.Module:
    # What CLIP pools goes through the norm; the task takes what has not been pooled.
    parts = {"post_layernorm": model.vision_model.post_layernorm}
    unused(*parts.values())
    return TailHead(model, "vision_model", Tail(parts, keep))


def _finish_siglip(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return own.post_layernorm(hidden), None


def _head_siglip(model: Any, kind: type[TailHead] = TailHead) -> nn.Module:
    base = model.vision_model
    parts = {"post_layernorm": base.post_layernorm}
    if hasattr(base, "head"):  # which pools, and the task takes what is not pooled
        parts["head"] = base.head
        unused(base.head)
    return kind(model, "vision_model", Tail(parts, _finish_siglip))


_CLIP = dataclasses.replace(
    VIT,
    embed=_embed_clip,
    blocks=lambda model: model.vision_model.encoder.layers,
    halves=_halves_clip,
    head=_head_clip,
)

# -- SigLIP 2: patches of images of any shape, padded to one number ----------------


class _MaskedHead(TailHead):
    """The last layer where the task pools those patches that are no padding."""

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """Return the logits."""
        masks = {"pixel_attention_mask": padding}
        return self.model(hidden, **masks, return_dict=True).logits


def _call_siglip2_embeddings(own: Any, pixels: Tensor, shapes: Tensor) -> Any:
    return own.embeddings(pixels, shapes)


def _embed_siglip2(model: Any) -> Embed:
    parts = {"embeddings": model.vision_model.embeddings}
    return Embed(parts, _call_siglip2_embeddings, mask=1)


def _whole_siglip2(model: Any, block: Any, _: int) -> Block:
    make = Attention(model.vision_model.config, "bidirectional")
    return Block({"block": block}, call_block, make)


def _halves_siglip2(model: Any, block: Any, index: int) -> tuple[Block, Block]:
    first, second = _halves_clip(model, block, index)
    first.attention_mask = Attention(model.vision_model.config, "bidirectional")
    return first, second


def _check_siglip2(_: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    if not set(_SIGLIP2_INPUTS) <= set(batch):
        raise ValueError(
            f"batch: expected {', '.join(_SIGLIP2_INPUTS)}, as the image processor of "
            f"SigLIP 2 makes them, got {', '.join(sorted(batch))}"
        )
    return batch


_SIGLIP2_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
_SIGLIP2 = dataclasses.replace(
    _CLIP,
    inputs=_SIGLIP2_INPUTS,
    embed=_embed_siglip2,
    whole=_whole_siglip2,
    halves=_halves_siglip2,
    head=functools.partial(_head_siglip, kind=_MaskedHead),
    complete=_check_siglip2,
)

# -- VideoMAE ----------------------------------------------------------------------


def _call_video_embeddings(own: Any, pixels: Tensor) -> Any:
    return own.embeddings(pixels, None)


def _attend_video(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.attention(own.norm(hidden)) + hidden


def _feed_video(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.output(own.intermediate(own.norm(hidden)), hidden)


def _embed_video(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_video_embeddings, mask=None)


def _halves_video(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    first = {"norm": block.layernorm_before, "attention": block.attention}
    second = {
        "norm": block.layernorm_after,
        "intermediate": block.intermediate,
        "output": block.output,
    }
    return Block(first, _attend_video, None), Block(second, _feed_video, None)


_VIDEO = dataclasses.replace(
    VIT,
    tasks=("video-classification",),
    embed=_embed_video,
    blocks=lambda base: base.encoder.layer,
    whole=_whole_dinov2,
    halves=_halves_video,
)

# -- TimeSformer, ViViT, V-JEPA 2 --------------------------------------------------


def _embed_vjepa2(base: Any) -> Embed:
    unused(base.predictor)
    return Embed({"embeddings": base.encoder.embeddings}, _call_embeddings, mask=None)


def _call_embeddings(own: Any, pixels: Tensor) -> Any:
    return own.embeddings(pixels)


def _attend_vjepa2(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.drop_path(own.attention(own.norm(hidden))[0]) + hidden


def _feed_vjepa2(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.drop_path(own.mlp(own.norm(hidden))) + hidden


def _halves_vjepa2(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    drops = twice(block.drop_path)
    first = {"norm": block.norm1, "attention": block.attention, "drop_path": drops[0]}
    second = {"norm": block.norm2, "mlp": block.mlp, "drop_path": drops[1]}
    return Block(first, _attend_vjepa2, None), Block(second, _feed_vjepa2, None)


def _finish_videos(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return own.layernorm(hidden), None


def _head_timesformer(model: Any) -> nn.Module:
    tail = Tail({"layernorm": model.timesformer.layernorm}, _finish_videos)
    return TailHead(model, "timesformer", tail)


def _head_vjepa2(model: Any) -> nn.Module:
    base = model.vjepa2
    parts = {"layernorm": base.encoder.layernorm, "predictor": base.predictor}
    return TailHead(model, "vjepa2", NamedTail(parts, _finish_videos))


_TIMESFORMER = dataclasses.replace(
    _VIDEO, embed=_embed_vit, halves=None, head=_head_timesformer
)
_VIVIT = dataclasses.replace(VIT, tasks=("video-classification",))
_VJEPA2 = dataclasses.replace(
    _VIDEO,
    inputs=("pixel_values_videos",),
    embed=_embed_vjepa2,
    halves=_halves_vjepa2,
    head=_head_vjepa2,
)

FAMILIES: dict[str, Family] = {
    "vit": VIT,
    "deit": VIT,
    "vit_msn": VIT,
    "ijepa": VIT,
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "clip": _CLIP,
    "metaclip_2": _CLIP,
    "siglip": dataclasses.replace(_CLIP, head=_head_siglip),
    "siglip2": _SIGLIP2,
    "videomae": _VIDEO,
    "timesformer": _TIMESFORMER,
    "vivit": _VIVIT,
    "vjepa2": _VJEPA2,
}
