"""Models of images whose layers call their modules one after the other.

What travels between layers are images ``(rows, channels, height, width)``, of LeViT and
Hiera patches ``(rows, patches, channels)``. A block is a layer, together with what
makes the image smaller in front of it. Batch norm is that of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.heads import Tail, TailHead, keep
from pipetransformer.adapters.families.parts import Block, Embed, Family
from pipetransformer.adapters.families.pyramids import staged

Modules = tuple[nn.Module, ...]
"""A layer's modules, in the order in which it calls them."""


def _call_stem(own: Any, pixels: Tensor) -> Any:
    return own.stem(pixels)


def _call_in_turn(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    for part in own.children():
        hidden = part(hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden


def _embed(base: Any, stem: str) -> Embed:
    return Embed({"stem": base.get_submodule(stem)}, _call_stem, mask=None)


def _whole(_: Any, block: Modules, __: int) -> Block:
    parts = {f"part{k}": part for k, part in enumerate(block)}
    return Block(parts, _call_in_turn, None)


def _head(model: Any, tail: tuple[str, ...], finish: Any) -> nn.Module:
    base = model.base_model
    parts = {name.rpartition(".")[2]: base.get_submodule(name) for name in tail}
    return TailHead(model, model.base_model_prefix, Tail(parts, finish))


def _finish(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    for name, part in own.named_children():
        if name == "pooler":
            return hidden, part(hidden).flatten(1)
        hidden = part(hidden)
    return hidden, hidden.mean([-2, -1])


def _chain(
    stem: str,
    blocks: Callable[[Any], list[Modules]],
    *tail: str,
    finish: Any = _finish,
) -> Family:
    """Return a family.

    Args:
        stem: The name of what embeds in a base model.
        blocks: Returns the modules of each of its layers.
        tail: Names of its submodules behind them, the pooler last; without one the
            mean of the image is pooled.
        finish: `keep` where the task pools by itself.
    """
    embed = functools.partial(_embed, stem=stem)
    head = functools.partial(_head, tail=tail, finish=finish)
    return staged(embed, blocks, _whole, head)


def _led(stages: Iterable[tuple[Any, Any]]) -> list[Modules]:
    """Return the modules of layers: what leads into a stage joins its first block.

    Args:
        stages: What leads into it, or None, and its blocks.
    """
    return [
        (block,) if k or lead is None else (lead, block)
        for lead, blocks in stages
        for k, block in enumerate(blocks)
    ]


# -- EfficientNet, MobileNet, BiT, TextNet, HGNet v2 -----------------------------


def _blocks_of_efficientnet(base: Any) -> list[Modules]:
    return _led([(None, base.encoder.blocks)])


def _blocks_of_mobilenet_v1(base: Any) -> list[Modules]:
    return list(zip(base.layer[::2], base.layer[1::2], strict=True))


def _blocks_of_mobilenet_v2(base: Any) -> list[Modules]:
    return _led([(None, base.layer)])


def _blocks_of_bit(base: Any) -> list[Modules]:
    return _led((None, stage.layers) for stage in base.encoder.stages)


def _blocks_of_textnet(base: Any) -> list[Modules]:
    return _led((None, stage.stage) for stage in base.encoder.stages)


def _blocks_of_hgnet(model: Any) -> list[Modules]:
    return _led((stage.downsample, stage.blocks) for stage in model.encoder.stages)


def _head_hgnet(model: Any) -> nn.Module:
    # The task model is its own base model.
    head = TailHead(model, "encoder", Tail({}, keep))
    head.model._modules["embedder"] = nn.Identity()
    return head


_HGNET = staged(
    functools.partial(_embed, stem="embedder"), _blocks_of_hgnet, _whole, _head_hgnet
)

# -- PoolFormer, SwiftFormer, MobileViT ------------------------------------------


def _blocks_of_poolformer(base: Any) -> list[Modules]:
    encoder = base.encoder
    leads = [None, *encoder.patch_embeddings[1:]]
    return _led(zip(leads, encoder.block, strict=True))


def _blocks_of_swiftformer(base: Any) -> list[Modules]:
    stages, lead = [], None
    for part in base.encoder.network:
        if hasattr(part, "blocks"):
            stages.append((lead, part.blocks))
        lead = None if hasattr(part, "blocks") else part
    return _led(stages)


def _blocks_of_mobilevit(base: Any) -> list[Modules]:
    # Stages of convolutions alone have blocks; others are one.
    stages = base.encoder.layer
    return _led((None, getattr(stage, "layer", [stage])) for stage in stages)


# -- LeViT -----------------------------------------------------------------------


def _call_levit(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    # In evaluation mode the attention keeps a bias of the weights as they were then.
    _forget_biases(own)
    value = own.block(hidden)
    _forget_biases(own)
    return value


def _forget_biases(module: nn.Module) -> None:
    part: Any
    for part in module.modules():
        if hasattr(part, "attention_bias_cache"):
            part.attention_bias_cache = {}


def _blocks_of_levit(base: Any) -> list[Any]:
    return [block for stage in base.encoder.stages for block in stage.layers]


def _whole_levit(_: Any, block: Any, __: int) -> Block:
    return Block({"block": block}, _call_levit, None)


_LEVIT = staged(
    functools.partial(_embed, stem="patch_embeddings"),
    _blocks_of_levit,
    _whole_levit,
    functools.partial(_head, tail=(), finish=keep),
)

# -- Hiera -----------------------------------------------------------------------


def _call_hiera_embeddings(own: Any, pixels: Tensor, stride: Any, schedule: Any) -> Any:
    from transformers.models.hiera.modeling_hiera import unroll

    value, shape = own.embeddings(pixels)[0], tuple(pixels.shape[-2:])
    return unroll(value, image_shape=shape, patch_stride=stride, schedule=schedule)


def _embed_hiera(base: Any) -> Embed:
    stride, schedule = base.config.patch_stride, base.unroll_schedule
    call = functools.partial(_call_hiera_embeddings, stride=stride, schedule=schedule)
    return Embed({"embeddings": base.embeddings}, call, mask=None)


def _blocks_of_hiera(base: Any) -> list[Modules]:
    return _led((None, stage.layers) for stage in base.encoder.stages)


_HIERA = staged(
    _embed_hiera,
    _blocks_of_hiera,
    _whole,
    functools.partial(_head, tail=("pooler",), finish=_finish),
)

FAMILIES: dict[str, Family] = {
    "efficientnet": _chain(
        "embeddings",
        _blocks_of_efficientnet,
        "encoder.top_conv",
        "encoder.top_bn",
        "encoder.top_activation",
        "pooler",
    ),
    "mobilenet_v1": _chain("conv_stem", _blocks_of_mobilenet_v1, "pooler"),
    "mobilenet_v2": _chain("conv_stem", _blocks_of_mobilenet_v2, "conv_1x1", "pooler"),
    "bit": _chain("embedder", _blocks_of_bit, "norm", "pooler"),
    "textnet": _chain("stem", _blocks_of_textnet, finish=keep),
    "hgnet_v2": _HGNET,
    "poolformer": _chain(
        "encoder.patch_embeddings.0", _blocks_of_poolformer, finish=keep
    ),
    "swiftformer": _chain("patch_embed", _blocks_of_swiftformer, finish=keep),
    "mobilevit": _chain("conv_stem", _blocks_of_mobilevit, "conv_1x1_exp"),
    "mobilevitv2": _chain("conv_stem", _blocks_of_mobilevit),
    "levit": _LEVIT,
    "hiera": _HIERA,
}
