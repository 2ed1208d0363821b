"""Models of images in stages, between which images shrink and channels grow.

What travels between layers tells its height and width by its shape: ``(rows, height,
width, channels)`` of windows of attention, ``(rows, channels, height, width)`` of
convolutions. A block is a layer, together with what makes the image smaller before or
behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.heads import Tail, TailHead
from pipetransformer.adapters.families.parts import Block, Embed, Family


def _unsplit(base: Any, _: Any, __: int) -> tuple[Block, Block]:
    raise ValueError(
        f"split_blocks: expected False of {base.config.model_type}, whose blocks are "
        "whole layers, got True"
    )


def _family(embed: Any, blocks: Any, whole: Any, head: Any) -> Family:
    return Family(
        inputs=("pixel_values",),
        tasks=("image-classification",),
        embed=embed,
        blocks=blocks,
        whole=whole,
        halves=_unsplit,
        head=head,
        ragged=False,
    )


# -- Swin, Swin v2 ---------------------------------------------------------------


def _call_swin_embeddings(own: Any, pixels: Tensor) -> Any:
    value, grid = own.embeddings(pixels)
    return value.unflatten(1, grid)


def _call_swin(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    height, width = hidden.shape[1:3]
    value = own.block(hidden.flatten(1, 2), (height, width))[0]
    if hasattr(own, "downsample"):
        value = own.downsample(value, (height, width))
        height, width = (height + 1) // 2, (width + 1) // 2
    return value.unflatten(1, (height, width))


def _finish_swin(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden = own.layernorm(hidden.flatten(1, 2))
    return hidden, own.pooler(hidden.transpose(1, 2)).flatten(1)


def _embed_swin(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_swin_embeddings, mask=None)


def _blocks_of_swin(base: Any) -> Sequence[Any]:
    return [
        (block, stage.downsample if k == len(stage.blocks) else None)
        for stage in base.encoder.layers
        for k, block in enumerate(stage.blocks, 1)
    ]


def _whole_swin(_: Any, block: Any, __: int) -> Block:
    parts = {"block": block[0]}
    if block[1] is not None:
        parts["downsample"] = block[1]
    return Block(parts, _call_swin, None)


def _head_swin(model: Any) -> nn.Module:
    base, name = model.base_model, model.base_model_prefix
    parts = {"layernorm": base.layernorm, "pooler": base.pooler}
    return TailHead(model, name, Tail(parts, _finish_swin))


# -- SegFormer -------------------------------------------------------------------


def _cut_patches(patches: nn.Module, image: Tensor) -> Any:
    value, height, width = patches(image)
    return value.unflatten(1, (height, width))


def _call_segformer_embeddings(own: Any, pixels: Tensor) -> Any:
    return _cut_patches(own.patches, pixels)


def _call_segformer(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    height, width = hidden.shape[1:3]
    value = own.block(hidden.flatten(1, 2), height, width).unflatten(1, (height, width))
    if hasattr(own, "patches"):
        value = _cut_patches(own.patches, _as_image(own.norm(value)))
    return value


def _as_image(hidden: Tensor) -> Tensor:
    return hidden.permute(0, 3, 1, 2).contiguous()


def _finish_segformer(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden = own.norm(hidden)
    return _as_image(hidden) if own.as_image else hidden.flatten(1, 2), None


def _embed_segformer(base: Any) -> Embed:
    parts = {"patches": base.stages[0].patch_embeddings}
    return Embed(parts, _call_segformer_embeddings, mask=None)


def _blocks_of_segformer(base: Any) -> Sequence[Any]:
    found = []
    for stage, following in zip(base.stages, [*base.stages[1:], None], strict=True):
        found += [(block, None, None) for block in stage.blocks]
        if following is not None:
            last = stage.layer_norm, following.patch_embeddings
            found[-1] = (stage.blocks[-1], *last)
    return found


def _whole_segformer(_: Any, block: Any, __: int) -> Block:
    names = ("block", "norm", "patches")
    found = zip(names, block, strict=True)
    parts = {name: part for name, part in found if part is not None}
    return Block(parts, _call_segformer, None)


def _head_segformer(model: Any) -> nn.Module:
    last = model.segformer.stages[-1]
    tail = Tail({"norm": last.layer_norm}, _finish_segformer)
    tail.as_image = last.reshape
    return TailHead(model, "segformer", tail)


# -- ConvNeXt, ConvNeXt v2 -------------------------------------------------------


def _call_embeddings(own: Any, pixels: Tensor) -> Any:
    return own.embeddings(pixels)


def _call_convnext(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    for part in own.downsample if hasattr(own, "downsample") else ():
        hidden = part(hidden)
    return own.block(hidden)


def _finish_convnext(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return hidden, own.layernorm(hidden.mean([-2, -1]))


def _embed_convnext(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_embeddings, mask=None)


def _blocks_of_convnext(base: Any) -> Sequence[Any]:
    return [
        (block, stage.downsampling_layer if k == 0 else ())
        for stage in base.encoder.stages
        for k, block in enumerate(stage.layers)
    ]


def _whole_convnext(_: Any, block: Any, __: int) -> Block:
    parts = {"block": block[0]}
    if len(block[1]):
        parts["downsample"] = block[1]
    return Block(parts, _call_convnext, None)


def _head_convnext(model: Any) -> nn.Module:
    parts = {"layernorm": model.base_model.layernorm}
    tail = Tail(parts, _finish_convnext)
    return TailHead(model, model.base_model_prefix, tail)


# -- ResNet, RegNet: batch norm, of a micro-batch --------------------------------


def _call_block(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.block(hidden)


def _finish_resnet(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return hidden, own.pooler(hidden)


def _embed_resnet(base: Any) -> Embed:
    return Embed({"embeddings": base.embedder}, _call_embeddings, mask=None)


def _blocks_of_resnet(base: Any) -> Sequence[Any]:
    return [block for stage in base.encoder.stages for block in stage.layers]


def _whole_resnet(_: Any, block: Any, __: int) -> Block:
    return Block({"block": block}, _call_block, None)


def _head_resnet(model: Any) -> nn.Module:
    tail = Tail({"pooler": model.base_model.pooler}, _finish_resnet)
    return TailHead(model, model.base_model_prefix, tail)


_SWIN = _family(_embed_swin, _blocks_of_swin, _whole_swin, _head_swin)
_CONVNEXT = _family(
    _embed_convnext, _blocks_of_convnext, _whole_convnext, _head_convnext
)
_RESNET = _family(_embed_resnet, _blocks_of_resnet, _whole_resnet, _head_resnet)
FAMILIES: dict[str, Family] = {
    "swin": _SWIN,
    "swinv2": _SWIN,
    "segformer": _family(
        _embed_segformer, _blocks_of_segformer, _whole_segformer, _head_segformer
    ),
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    "resnet": _RESNET,
    "regnet": _RESNET,
}
