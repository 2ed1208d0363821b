"""Models of images and videos whose layers keep the number of patches."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.heads import Tail, TailHead, keep, unused
from pipetransformer.adapters.families.parts import (
    Block,
    Embed,
    Family,
    call_block,
)


def call_alone(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    """Call a whole block that takes the hidden states and nothing else."""
    return own.block(hidden)


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


def _head_siglip(model: Any) -> nn.Module:
    base = model.vision_model
    parts = {"post_layernorm": base.post_layernorm}
    if hasattr(base, "head"):  # which pools, and the task takes what is not pooled
        parts["head"] = base.head
        unused(base.head)
    return TailHead(model, "vision_model", Tail(parts, _finish_siglip))


_CLIP = dataclasses.replace(
    VIT,
    embed=_embed_clip,
    blocks=lambda model: model.vision_model.encoder.layers,
    halves=_halves_clip,
    head=_head_clip,
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
    "videomae": _VIDEO,
}
