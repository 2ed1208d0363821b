"""BEiT and data2vec: the attention has a bias by relative position.

Each block has one of its own, or all blocks share one. Then the table that it is made
of travels with the hidden states, a copy for each row ``(rows, distances, heads)``, and
each layer makes the bias of it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.heads import Tail, TailHead, unused
from pipetransformer.adapters.families.parts import Block, Embed, Family, State
from pipetransformer.adapters.families.vision import VIT, call_vit_embeddings, twice


class _TableEmbed(Embed):
    """The first layer where blocks share a bias: holds its table and hands it on."""

    def forward(self, *tensors: Tensor) -> State:
        """Embed a batch."""
        hidden: Any = super().forward(*tensors)
        table: Any = self.get_submodule("bias").relative_position_bias_table
        return hidden, table.expand(hidden.shape[0], *table.shape)


class _TableBlock(Block):
    """A layer behind it.

    Args:
        parts: As of a `Block`.
        call: Takes the layer, hidden states and the bias, None in a layer without.
        bias: The model's module that makes the bias; its table is not used, and not
            held. None: the layer has no attention.
    """

    def __init__(self, parts: Any, call: Any, bias: Any) -> None:
        super().__init__(parts, call, None)
        self._make = None if bias is None else _bias_of(bias)

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> State:
        """Run the block; `padding` is the table, which is handed on as it is."""
        table: Any = padding
        bias = None if self._make is None else self._make(table[0])
        return self._call(self, hidden, bias), table


def _bias_of(module: Any) -> Any:
    names = ("window_size", "num_relative_distance")
    fixed = {name: getattr(module, name) for name in names}
    return functools.partial(_bias, type(module), fixed)


def _bias(kind: Any, fixed: dict[str, Any], table: Tensor) -> Any:
    index = kind.generate_relative_position_index
    own = types.SimpleNamespace(
        **fixed,
        relative_position_bias_table=table,
        generate_relative_position_index=index,
    )
    return kind.forward(own, fixed["window_size"])


def _call_sized_embeddings(own: Any, pixels: Tensor, size: tuple[int, int]) -> Any:
    if pixels.shape[2:] != size:
        raise ValueError(
            f"pixel_values: expected images of {size[0]} x {size[1]} "
            f"(config.image_size), got {pixels.shape[2]} x {pixels.shape[3]}"
        )
    value = call_vit_embeddings(own, pixels)
    return value[0] if isinstance(value, tuple) else value


def _size_of(config: Any) -> tuple[int, int]:
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _added(own: Any, value: Any, hidden: Tensor) -> Any:
    scale = own._parameters.get("scale")
    return own.drop_path(value if scale is None else scale * value) + hidden


def _make_beit_embed(base: Any, shared: Any) -> Embed:
    call = functools.partial(_call_sized_embeddings, size=_size_of(base.config))
    unused(base.embeddings.mask_token)
    parts = {"embeddings": base.embeddings}
    if shared is None:
        return Embed(parts, call, mask=None)
    return _TableEmbed({**parts, "bias": shared}, call, mask=None)


def _make_block(parts: Any, call: Any, shared: Any, *, attends: bool = True) -> Block:
    if shared is None:
        return Block(parts, call, None)
    return _TableBlock(parts, call, shared if attends else None)


def _scaled(block: Block, scale: Any) -> Block:
    if isinstance(scale, nn.Parameter):
        block.register_parameter("scale", scale)
    return block


# -- BEiT ------------------------------------------------------------------------


def _call_beit(
    own: Any, hidden: Tensor, bias: Tensor | None, size: tuple[int, int]
) -> Any:
    return own.block(hidden, attention_mask=bias, resolution=size)


def _attend_beit(own: Any, hidden: Tensor, bias: Tensor | None) -> Any:
    if hasattr(own, "bias"):
        made = own.bias(own.bias.window_size)
        bias = made if bias is None else made + bias
    value = own.attention(own.norm(hidden), attention_mask=bias)[0]
    return _added(own, own.dropout(value), hidden)


def _feed_beit(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return _added(own, own.dropout(own.mlp(own.norm(hidden))), hidden)


def _embed_beit(base: Any) -> Embed:
    return _make_beit_embed(base, base.shared_position_bias)


def _whole_beit(base: Any, block: Any, _: int) -> Block:
    call = functools.partial(_call_beit, size=_size_of(base.config))
    return _make_block({"block": block}, call, base.shared_position_bias)


def _halves_beit(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    drops, paths = twice(block.dropout), twice(block.drop_path)
    first = {
        "norm": block.layernorm_before,
        "attention": block.attention,
        "dropout": drops[0],
        "drop_path": paths[0],
    }
    if block.relative_position_bias is not None:
        first["bias"] = block.relative_position_bias
    second = {
        "norm": block.layernorm_after,
        "mlp": block.mlp,
        "dropout": drops[1],
        "drop_path": paths[1],
    }
    shared = base.shared_position_bias
    attend = _make_block(first, _attend_beit, shared)
    feed = _make_block(second, _feed_beit, shared, attends=False)
    return _scaled(attend, block.lambda_1), _scaled(feed, block.lambda_2)


_BEIT = dataclasses.replace(
    VIT,
    embed=_embed_beit,
    whole=_whole_beit,
    halves=_halves_beit,
    tail=("layernorm", "pooler"),
)


# -- data2vec --------------------------------------------------------------------


def _call_data2vec(
    own: Any, hidden: Tensor, bias: Tensor | None, size: tuple[int, int]
) -> Any:
    return own.block(hidden, relative_position_bias=bias, resolution=size)[0]


def _attend_data2vec(
    own: Any, hidden: Tensor, bias: Tensor | None, size: tuple[int, int]
) -> Any:
    value = own.attention(
        own.norm(hidden), relative_position_bias=bias, resolution=size
    )
    return _added(own, value[0], hidden)


def _feed_data2vec(own: Any, hidden: Tensor, _: Tensor | None) -> Any:
    return _added(own, own.output(own.intermediate(own.norm(hidden))), hidden)


def _shared_data2vec(base: Any) -> Any:
    return getattr(base.encoder, "relative_position_bias", None)


def _embed_data2vec(base: Any) -> Embed:
    return _make_beit_embed(base, _shared_data2vec(base))


def _whole_data2vec(base: Any, block: Any, _: int) -> Block:
    call = functools.partial(_call_data2vec, size=_size_of(base.config))
    return _make_block({"block": block}, call, _shared_data2vec(base))


def _halves_data2vec(base: Any, block: Any, _: int) -> tuple[Block, Block]:
    paths, shared = twice(block.drop_path), _shared_data2vec(base)
    first = {
        "norm": block.layernorm_before,
        "attention": block.attention,
        "drop_path": paths[0],
    }
    second = {
        "norm": block.layernorm_after,
        "intermediate": block.intermediate,
        "output": block.output,
        "drop_path": paths[1],
    }
    call = functools.partial(_attend_data2vec, size=_size_of(base.config))
    attend = _make_block(first, call, shared)
    feed = _make_block(second, _feed_data2vec, shared, attends=False)
    return _scaled(attend, block.lambda_1), _scaled(feed, block.lambda_2)


def _head_data2vec(model: Any) -> nn.Module:
    base = model.data2vec_vision
    parts = {"layernorm": base.layernorm, "pooler": base.pooler}
    return TailHead(model, "data2vec_vision", Tail(parts, _finish_data2vec))


def _finish_data2vec(own: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden = own.layernorm(hidden)
    return hidden, own.pooler(hidden)


_DATA2VEC = dataclasses.replace(
    VIT,
    embed=_embed_data2vec,
    blocks=lambda base: base.encoder.layer,
    whole=_whole_data2vec,
    halves=_halves_data2vec,
    head=_head_data2vec,
)

FAMILIES: dict[str, Family] = {"beit": _BEIT, "data2vec-vision": _DATA2VEC}
