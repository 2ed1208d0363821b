"""Models of images in stages, between which images shrink and channels grow.

What travels between layers tells its height and width by its shape: ``(rows, height,
width, channels)`` of windows of attention, ``(rows, channels, height, width)`` of
convolutions. A block is a layer, together with what makes the image smaller before or
behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapters.families.heads import Tail, TailHead
from pipetransformer.adapters.families.parts import Block, Embed, Family


def staged(embed: Any, blocks: Any, whole: Any, head: Any) -> Family:
    """Return a family of images whose blocks are whole layers."""
    return Family(
        inputs=("pixel_values",),
        tasks=("image-classification",),
        embed=embed,
        blocks=blocks,
        whole=whole,
        head=head,
        ragged=False,
    )


class NamedTail(Tail):
    """A tail whose task model hands its first argument on by name."""

    def forward(self, *hidden: Any, **named: Any) -> Any:
        """Return hidden states as a base model returns them."""
        first, *_ = (*hidden, *named.values())
        return super().forward(first)


# -- Swin, Swin v2, Donut's; FocalNet --------------------------------------------


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
    hidden = hidden.flatten(1, 2)
    if hasattr(own, "layernorm"):
        hidden = own.layernorm(hidden)
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
    return Block(_parts_of(("block", "downsample"), block), _call_swin, None)


def _call_focalnet(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    grid = hidden.shape[1:3]
    value = own.block(hidden.flatten(1, 2), grid)
    if hasattr(own, "downsample"):
        image = value.transpose(1, 2).reshape(len(value), -1, *grid)
        value, grid = own.downsample(image)
    return value.unflatten(1, grid)


def _blocks_of_focalnet(base: Any) -> Sequence[Any]:
    return [
        (block, stage.downsample if k == len(stage.layers) else None)
        for stage in base.encoder.stages
        for k, block in enumerate(stage.layers, 1)
    ]


def _whole_focalnet(_: Any, block: Any, __: int) -> Block:
    return Block(_parts_of(("block", "downsample"), block), _call_focalnet, None)


def _parts_of(names: tuple[str, ...], found: Any) -> dict[str, nn.Module]:
    pairs = zip(names, found, strict=True)
    return {name: part for name, part in pairs if part is not None}


def _head_swin(model: Any) -> nn.Module:
    base, name = model.base_model, model.base_model_prefix
    found = getattr(base, "layernorm", None), base.pooler  # Donut's has no norm
    parts = _parts_of(("layernorm", "pooler"), found)
    return TailHead(model, name, Tail(parts, _finish_swin))


# -- SegFormer, PVT v2 -----------------------------------------------------------


def _cut_patches(patches: nn.Module, image: Tensor) -> Any:
    value, height, width = patches(image)
    return value.unflatten(1, (height, width))


def _call_segformer_embeddings(own: Any, pixels: Tensor) -> Any:
    return _cut_patches(own.patches, pixels)


def _call_segformer(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    height, width = hidden.shape[1:3]
    value = own.block(hidden.flatten(1, 2), height, width)
    value = value[0] if isinstance(value, tuple) else value
    value = value.unflatten(1, (height, width))
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
    return _joined(base.stages, "patch_embeddings")


def _joined(stages: Any, patches: str) -> Sequence[Any]:
    found = []
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        found += [(block, None, None) for block in stage.blocks]
        if following is not None:
            last = stage.layer_norm, getattr(following, patches)
            found[-1] = (stage.blocks[-1], *last)
    return found


def _whole_segformer(_: Any, block: Any, __: int) -> Block:
    return Block(_parts_of(("block", "norm", "patches"), block), _call_segformer, None)


def _head_segformer(model: Any) -> nn.Module:
    last = model.segformer.stages[-1]
    tail = Tail({"norm": last.layer_norm}, _finish_segformer)
    tail.as_image = last.reshape
    return TailHead(model, "segformer", tail)


def _embed_pvt_v2(base: Any) -> Embed:
    parts = {"patches": base.encoder.layers[0].patch_embedding}
    return Embed(parts, _call_segformer_embeddings, mask=None)


def _blocks_of_pvt_v2(base: Any) -> Sequence[Any]:
    return _joined(base.encoder.layers, "patch_embedding")


def _head_pvt_v2(model: Any) -> nn.Module:
    last = model.base_model.encoder.layers[-1]
    tail: Any = NamedTail({"norm": last.layer_norm}, _finish_segformer)
    tail.as_image = True
    return TailHead(model, "pvt_v2", tail)


# -- PVT: a token of the class leads the patches of the last stage ---------------


def _cut_pvt(patches: Any, image: Tensor) -> Any:
    value, height, width = patches(image)
    grid = (height, width)
    return value if patches.cls_token is not None else value.unflatten(1, grid)


def _call_pvt_embeddings(own: Any, pixels: Tensor) -> Any:
    return _cut_pvt(own.patches, pixels)


def _call_pvt(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    if hasattr(own, "patches"):
        hidden = _cut_pvt(own.patches, _as_image(hidden))
    if hidden.dim() == 3:  # its attention reads no grid
        return own.block(hidden, 0, 0)[0]
    height, width = hidden.shape[1:3]
    value = own.block(hidden.flatten(1, 2), height, width)[0]
    return value.unflatten(1, (height, width))


def _finish_pvt(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return own.norm(hidden), None


def _embed_pvt(base: Any) -> Embed:
    parts = {"patches": base.encoder.patch_embeddings[0]}
    return Embed(parts, _call_pvt_embeddings, mask=None)


def _blocks_of_pvt(base: Any) -> Sequence[Any]:
    patches = [None, *base.encoder.patch_embeddings[1:]]
    return [
        (patches[stage] if k == 0 else None, block)
        for stage, blocks in enumerate(base.encoder.block)
        for k, block in enumerate(blocks)
    ]


def _whole_pvt(_: Any, block: Any, __: int) -> Block:
    return Block(_parts_of(("patches", "block"), block), _call_pvt, None)


def _head_pvt(model: Any) -> nn.Module:
    tail = NamedTail({"norm": model.pvt.encoder.layer_norm}, _finish_pvt)
    return TailHead(model, "pvt", tail)


# -- CvT: a token of the class travels beside the patches of its stage -----------


class _CvtBlock(Block):
    """A layer of CvT.

    Args:
        block: The model's, what embeds its stage's patches if it is the first one, and
            the token of the class if it is the first one that has it.
        last: Whether the task reads what it makes, of which it takes the token alone.
    """

    def __init__(self, block: Any, *, last: bool) -> None:
        super().__init__(_parts_of(("block", "embedding"), block[:2]), _call_cvt, None)
        self.register_parameter("cls_token", block[2])
        self._last = last

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """Run the block; `padding` is the token ``(rows, 1, channels)``."""
        token = padding
        if "embedding" in self._modules:
            embed = self.get_submodule("embedding")
            hidden, token = _embed_cvt_patches(embed, hidden.permute(0, 3, 1, 2)), None
        grid = hidden.shape[1:3]
        value: Any = hidden.flatten(1, 2)
        own = self._parameters["cls_token"]
        if own is not None:
            token = own.expand(len(value), -1, -1)
        if token is not None:
            value = torch.cat((token, value), 1)
        value = self._call(self, value, grid)
        if token is None:
            return value.unflatten(1, grid)
        token, value = value.split([1, value.shape[1] - 1], 1)
        return token if self._last else (value.unflatten(1, grid), token)


def _call_cvt(own: Any, hidden: Tensor, grid: tuple[int, int]) -> Any:
    return own.block(hidden, *grid)


def _embed_cvt_patches(embedding: nn.Module, image: Tensor) -> Tensor:
    value: Tensor = embedding(image)
    return value.permute(0, 2, 3, 1)


def _call_cvt_embeddings(own: Any, pixels: Tensor) -> Any:
    return _embed_cvt_patches(own.embedding, pixels)


def _embed_cvt(base: Any) -> Embed:
    if not base.config.cls_token[-1]:
        raise ValueError(
            "config: expected a class token in the last stage, got cls_token="
            f"{base.config.cls_token}"
        )
    parts = {"embedding": base.encoder.stages[0].embedding}
    return Embed(parts, _call_cvt_embeddings, mask=None)


def _blocks_of_cvt(base: Any) -> Sequence[Any]:
    found = []
    for k, stage in enumerate(base.encoder.stages):
        first, *others = stage.layers
        token = getattr(stage, "cls_token", None)
        found.append((first, stage.embedding if k else None, token))
        found += [(block, None, None) for block in others]
    return found


def _whole_cvt(base: Any, block: Any, index: int) -> Block:
    return _CvtBlock(block, last=index == sum(base.config.depth) - 1)


def _finish_cvt(_: Any, token: Tensor) -> tuple[Tensor, Tensor | None]:
    return token, token


def _head_cvt(model: Any) -> nn.Module:
    return TailHead(model, "cvt", Tail({}, _finish_cvt))


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


_SWIN = staged(_embed_swin, _blocks_of_swin, _whole_swin, _head_swin)
_CONVNEXT = staged(
    _embed_convnext, _blocks_of_convnext, _whole_convnext, _head_convnext
)
_RESNET = staged(_embed_resnet, _blocks_of_resnet, _whole_resnet, _head_resnet)
FAMILIES: dict[str, Family] = {
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "focalnet": staged(_embed_swin, _blocks_of_focalnet, _whole_focalnet, _head_swin),
    "segformer": staged(
        _embed_segformer, _blocks_of_segformer, _whole_segformer, _head_segformer
    ),
    "pvt": staged(_embed_pvt, _blocks_of_pvt, _whole_pvt, _head_pvt),
    "pvt_v2": staged(_embed_pvt_v2, _blocks_of_pvt_v2, _whole_segformer, _head_pvt_v2),
    "cvt": staged(_embed_cvt, _blocks_of_cvt, _whole_cvt, _head_cvt),
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    "resnet": _RESNET,
    "regnet": _RESNET,
}
