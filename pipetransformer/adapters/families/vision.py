"""Models of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.parts import (
    Block,
    Embed,
    Family,
    call_block,
)

# -- ViT, DeiT -------------------------------------------------------------------


def _call_vit_embeddings(own: Any, pixels: Tensor) -> Any:
    dtype = own.embeddings.patch_embeddings.projection.weight.dtype
    return own.embeddings(pixels.to(dtype))


def _attend_vit(own: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    return own.dropout(own.attention(own.norm(hidden), mask)[0]) + hidden


def _feed_vit(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return own.dropout(own.mlp(own.norm(hidden))) + hidden


def _embed_vit(base: Any) -> Embed:
    return Embed({"embeddings": base.embeddings}, _call_vit_embeddings, mask=None)


def _whole_vit(_: Any, block: Any, __: int) -> Block:
    return Block({"block": block}, call_block, None)


def _halves_vit(_: Any, block: Any, __: int) -> tuple[Block, Block]:
    first = {"norm": block.layernorm_before, "attention": block.attention}
    second = {"norm": block.layernorm_after, "mlp": block.mlp}
    # Each half has a dropout of its own: layers share no module.
    own = [nn.Dropout(block.dropout.p).train(block.training) for _ in range(2)]
    return (
        Block({**first, "dropout": own[0]}, _attend_vit, None),
        Block({**second, "dropout": own[1]}, _feed_vit, None),
    )


_VIT = Family(
    inputs=("pixel_values",),
    tasks=("image-classification",),
    embed=_embed_vit,
    blocks=lambda base: base.layers,
    whole=_whole_vit,
    halves=_halves_vit,
    tail=("layernorm",),
    ragged=False,
)
FAMILIES: dict[str, Family] = {
    "vit": _VIT,
    "deit": _VIT,
}
