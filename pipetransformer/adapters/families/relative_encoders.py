"""Encoders of text whose blocks share an embedding of distances: MPNet, DeBERTa."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.adapters.families.encoder_parts import (
    TEXT_TASKS,
    MaskedEmbed,
    TableBlock,
    TableEmbed,
    all_but,
)
from pipetransformer.adapters.families.heads import unused
from pipetransformer.adapters.families.parts import (
    Attention,
    Embed,
    Family,
    positions,
)


def _feed(own: Any, hidden: Tensor, _: Any, __: Any) -> Any:
    return own.output(own.intermediate(hidden), hidden)


# -- MPNet: the table is added to the scores, by bucket of distance --------------


class _Buckets(Attention):
    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        """Make the attention's mask, and the bucket of each pair of positions."""
        from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

        places = positions(hidden)
        buckets = MPNetEncoder.relative_position_bucket(places - places.mT)
        return super().make(hidden, there, **more), buckets


def _bias(buckets: Tensor, table: Tensor) -> Tensor:
    return functional.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)


def _call_mpnet_embeddings(own: Any, input_ids: Tensor) -> Any:
    return own.embeddings(input_ids=input_ids)


def _mpnet_table(own: Any) -> Any:
    # A view: a parameter itself may not leave its layer.
    return own.relative.weight.view_as(own.relative.weight)


def _call_mpnet(own: Any, hidden: Tensor, made: Any, table: Tensor) -> Any:
    mask, buckets = made
    return own.block(hidden, mask, position_bias=_bias(buckets, table))[0]


def _attend_mpnet(own: Any, hidden: Tensor, made: Any, table: Tensor) -> Any:
    mask, buckets = made
    return own.attention(hidden, mask, position_bias=_bias(buckets, table))[0]


def _embed_mpnet(base: Any) -> Embed:
    first = Embed({"embeddings": base.embeddings}, _call_mpnet_embeddings, mask=1)
    relative = base.encoder.relative_attention_bias
    return TableEmbed(first, {"relative": relative}, _mpnet_table)


def _whole_mpnet(base: Any, block: Any, _: int) -> TableBlock:
    return TableBlock({"block": block}, _call_mpnet, _Buckets(base.config, _BOTH))


def _halves_mpnet(base: Any, block: Any, _: int) -> tuple[TableBlock, TableBlock]:
    first = {"attention": block.attention}
    second = {"intermediate": block.intermediate, "output": block.output}
    make = _Buckets(base.config, _BOTH)
    return TableBlock(first, _attend_mpnet, make), TableBlock(second, _feed, None)


# -- DeBERTa: keys and queries are made of the table in each block ---------------


class _Distances(Attention):
    """Makes the mask of pairs, the distance of each pair, and the mask of tokens.

    Args:
        base: The base model.
    """

    def __init__(self, base: Any) -> None:
        super().__init__(base.config, _BOTH)
        names = ("position_buckets", "max_relative_positions")  # of the encoder
        self.spread = [getattr(base.encoder, name, None) for name in names]

    def make(self, hidden: Tensor, there: Tensor, **_: Any) -> Any:
        """Make all three; without relative attention distances are None."""
        from transformers.models.deberta import modeling_deberta as first
        from transformers.models.deberta_v2 import modeling_deberta_v2 as second

        distances, (buckets, most) = None, self.spread
        if buckets is not None:
            distances = second.build_relative_position(hidden, hidden, buckets, most)
        elif most is not None:
            distances = first.build_relative_position(hidden, hidden)
        pairs = there[:, None, :, None] & there[:, None, None, :]
        return pairs, distances, there.long()


def _call_deberta_embeddings(
    own: Any, input_ids: Tensor, token_types: Tensor, there: Tensor
) -> Any:
    return own.embeddings(input_ids=input_ids, token_type_ids=token_types, mask=there)


def _deberta_table(own: Any) -> Any:
    if not hasattr(own, "relative"):
        return None
    table = own.relative.weight
    return own.norm(table) if hasattr(own, "norm") else table.view_as(table)


def _call_deberta(own: Any, hidden: Tensor, made: Any, table: Any) -> Any:
    pairs, distances, there = made
    given = {"relative_pos": distances, "rel_embeddings": table}
    value = own.block(hidden, pairs, **given)[0]
    return own.conv(hidden, value, there) if hasattr(own, "conv") else value


def _attend_deberta(own: Any, hidden: Tensor, made: Any, table: Any) -> Any:
    pairs, distances, _ = made
    given = {"relative_pos": distances, "rel_embeddings": table}
    return own.attention(hidden, pairs, **given)[0]


def _embed_deberta(base: Any) -> Embed:
    encoder, parts = base.encoder, {}
    if encoder.relative_attention:
        parts["relative"] = encoder.rel_embeddings
    if "layer_norm" in getattr(encoder, "norm_rel_ebd", ()):
        parts["norm"] = encoder.LayerNorm
    if not encoder.relative_attention or not base.config.pos_att_type:
        unused(*parts.values())  # no block reads the table
    embeddings = {"embeddings": base.embeddings}
    first = MaskedEmbed(embeddings, _call_deberta_embeddings, mask=1)
    return TableEmbed(first, parts, _deberta_table)


def _whole_deberta(base: Any, block: Any, index: int) -> TableBlock:
    parts: dict[str, nn.Module] = {"block": block}
    if index == 0 and getattr(base.encoder, "conv", None) is not None:
        parts["conv"] = base.encoder.conv
    return TableBlock(parts, _call_deberta, _Distances(base))


def _halves_deberta(base: Any, block: Any, index: int) -> tuple[TableBlock, ...]:
    if index == 0 and getattr(base.encoder, "conv", None) is not None:
        # The convolution joins what goes into the block and what comes out of it.
        return (_whole_deberta(base, block, index),)
    first = {"attention": block.attention}
    second = {"intermediate": block.intermediate, "output": block.output}
    make = _Distances(base)
    return TableBlock(first, _attend_deberta, make), TableBlock(second, _feed, None)


_BOTH = "bidirectional"

_DEBERTA = Family(
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    tasks=TEXT_TASKS,
    embed=_embed_deberta,
    blocks=lambda base: base.encoder.layer,
    whole=_whole_deberta,
    halves=_halves_deberta,
)
FAMILIES: dict[str, Family] = {
    "mpnet": Family(
        inputs=("input_ids", "attention_mask"),
        tasks=TEXT_TASKS,
        embed=_embed_mpnet,
        blocks=lambda base: base.encoder.layer,
        whole=_whole_mpnet,
        halves=_halves_mpnet,
        tail=("pooler",),
    ),
    "deberta": Family(
        inputs=_DEBERTA.inputs,
        tasks=all_but("multiple-choice"),
        embed=_embed_deberta,
        blocks=_DEBERTA.blocks,
        whole=_whole_deberta,
        halves=_halves_deberta,
    ),
    "deberta-v2": _DEBERTA,
}
