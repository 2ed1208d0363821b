"""Causal language models, and classifiers and readers made of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    positions,
)


@dataclasses.dataclass(frozen=True)
class _Form:
    """Names of the submodules of a base model and of its blocks.

    Where a name is that of a number, it is the rate of a dropout or a factor.

    Attributes:
        tokens: Embeds ids.
        after: Follows the embeddings.
        layers: The blocks.
        attention: Of a block: what goes before its attention, that, and what follows it
            before both are added to the hidden states.
        feed: The same of its MLP.
        masks: ``"causal"``; ``"window"``, sliding if the config has a window;
            ``"types"``, sliding where ``config.layer_types`` says so.
        parallel: The config's entry that tells whether attention and MLP of a block
            read the same hidden states, so that it stays whole; ``"always"``: they do.
    """

    tokens: str = "embed_tokens"
    after: str = ""
    layers: str = "layers"
    attention: tuple[str, str, str] = ("input_layernorm", "self_attn", "")
    feed: tuple[str, str, str] = ("post_attention_layernorm", "mlp", "")
    masks: str = "causal"
    parallel: str = ""


# -- the first layer ---------------------------------------------------------------


class _Tokens(Embed):
    """The first layer of a decoder; it marks tokens in the padding mask.

    A decoder classifies a sequence by its last token that is not
    ``config.pad_token_id``. The batch's mask does not tell which that is: most decoders
    are padded with the token that ends a text.

    Args:
        parts: As of `Embed`.
        call: Takes the layer, ids and mask, ``(rows, length)`` int64 and bool.
        config: The model's.
    """

    def __init__(self, parts: dict[str, nn.Module], call: Any, config: Any) -> None:
        super().__init__(parts, call, mask=1)
        self.config = config

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Embed ids; the mask, 1 or True at tokens, becomes that of `parts.State`."""
        ids, mask = tensors
        there = mask.bool()
        marks = there.to(torch.uint8)
        pad = self.config.get_text_config().pad_token_id
        if pad is not None:
            marks = marks + (there & (ids == pad))
        return self._call(self, ids, there), marks


class _Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor


def _part(owner: Any, name: str) -> nn.Module:
    """Return a submodule by name, or what a number by that name stands for."""
    part = getattr(owner, name) if name else nn.Identity()
    if isinstance(part, nn.Module):
        return part
    return nn.Dropout(part) if name.endswith("dropout") else _Times(part)


def _call_tokens(own: Any, ids: Tensor, _: Tensor) -> Any:
    return own.after(own.tokens(ids))


def _embed(base: Any, form: _Form) -> Embed:
    _check(base.config)
    parts = {"tokens": getattr(base, form.tokens), "after": _part(base, form.after)}
    return _Tokens(parts, _call_tokens, base.config)


def _check(config: Any) -> None:
    """Raise a ValueError for what layers cannot do as the model does."""
    wanted = {
        "output_router_logits=False": "the loss of the routers is one over all layers",
        "layerdrop=0.0": "no blocks are left out",
        "use_bidirectional_attention=False": "the mask of these layers is causal",
        "add_cross_attention=False": "there is no encoder",
    }
    for setting, reason in wanted.items():
        found = getattr(config, setting.partition("=")[0], None)
        if found:
            raise ValueError(
                f"model: expected config.{setting}, since {reason}, got {found}"
            )


# -- blocks ------------------------------------------------------------------------


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _placed(hidden: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
    """Add positions to rotary embeddings: some models look at both."""
    return {**extra, "position_ids": positions(hidden)} if extra else extra


def _call_block(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    more = _placed(hidden, extra)
    return _first(own.block(hidden, attention_mask=mask, **more))


def _attend(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    more = _placed(hidden, extra)
    value = own.attn(own.norm(hidden), attention_mask=mask, **more)
    return hidden + own.after(_first(value))


def _feed(own: Any, hidden: Tensor, _: Any) -> Any:
    return hidden + own.after(_first(own.mlp(own.norm(hidden))))


def _around(base: Any, index: int, form: _Form) -> tuple[Any, Any, Any]:
    """Return what makes a block's masks and rotary embeddings, and their type."""
    config, layer_type = base.config, None
    if form.masks == "types":
        layer_type = config.layer_types[index]
        slides = layer_type == "sliding_attention"
    else:
        slides = form.masks == "window" and config.sliding_window is not None
    rotary = getattr(base, "rotary_emb", None)
    if (
        rotary is None
        or "layer_type" not in inspect.signature(rotary.forward).parameters
    ):
        layer_type = None  # they are the same in all blocks
    return Attention(config, "sliding" if slides else "causal"), rotary, layer_type


def _whole(base: Any, block: Any, index: int, form: _Form) -> Block:
    return Block({"block": block}, _call_block, *_around(base, index, form))


def _halves(base: Any, block: Any, index: int, form: _Form) -> tuple[Block, ...]:
    if form.parallel == "always" or getattr(base.config, form.parallel, False):
        return (_whole(base, block, index, form),)
    first, second = (
        dict(zip(("norm", name, "after"), (_part(block, n) for n in half), strict=True))
        for name, half in (("attn", form.attention), ("mlp", form.feed))
    )
    around = _around(base, index, form)
    return Block(first, _attend, *around), Block(second, _feed, None)


def _family(
    form: _Form, tail: tuple[str, ...] = ("norm",), fp32_token_loss: bool = True
) -> Family:
    return Family(
        inputs=("input_ids", "attention_mask"),
        tasks=(
            "causal-lm",
            "sequence-classification",
            "token-classification",
            "question-answering",
        ),
        embed=functools.partial(_embed, form=form),
        blocks=lambda base: getattr(base, form.layers),
        whole=functools.partial(_whole, form=form),
        halves=functools.partial(_halves, form=form),
        tail=tail,
        fp32_token_loss=fp32_token_loss,
        pools_last=True,
    )


# -- GPT-2, GPT-J ------------------------------------------------------------------


def _call_gpt2_embeddings(own: Any, ids: Tensor, _: Tensor) -> Any:
    value = own.wte(ids)
    return own.drop(value + own.wpe(positions(value)))


def _embed_gpt2(base: Any) -> Embed:
    _check(base.config)
    parts = {"wte": base.wte, "wpe": base.wpe, "drop": base.drop}
    return _Tokens(parts, _call_gpt2_embeddings, base.config)


def _call_gptj(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    # Before transformers 5.24 it made its rotary embeddings of the positions.
    extra["position_ids"] = positions(hidden)
    return _first(own.block(hidden, attention_mask=mask, **extra))


def _whole_gptj(base: Any, block: Any, index: int) -> Block:
    return Block({"block": block}, _call_gptj, *_around(base, index, _GPTJ))


def _halves_gptj(base: Any, block: Any, index: int) -> tuple[Block, ...]:
    return (_whole_gptj(base, block, index),)


# -- OPT ---------------------------------------------------------------------------


def _call_opt_embeddings(own: Any, ids: Tensor, there: Tensor) -> Any:
    return own.project(own.tokens(ids)) + own.places(there)


def _embed_opt(base: Any) -> Embed:
    _check(base.config)
    decoder = base.decoder
    parts = {
        "tokens": decoder.embed_tokens,
        "places": decoder.embed_positions,
        "project": decoder.project_in or nn.Identity(),
    }
    return _Tokens(parts, _call_opt_embeddings, base.config)


def _attend_opt(own: Any, hidden: Tensor, mask: Any) -> Any:
    value = own.attn(own.before(hidden), attention_mask=mask)[0]
    return own.after(hidden + own.dropout(value))


def _feed_opt(own: Any, hidden: Tensor, _: Any) -> Any:
    flat = hidden.reshape(-1, hidden.shape[-1])
    value = own.down(own.activation(own.up(own.before(flat))))
    return own.after((flat + own.dropout(value)).view(hidden.shape))


def _halves_opt(base: Any, block: Any, _: int) -> tuple[Block, ...]:
    def norms(norm: nn.Module) -> dict[str, nn.Module]:
        pair = (norm, nn.Identity())
        before, after = pair if block.do_layer_norm_before else pair[::-1]
        return {"before": before, "after": after, "dropout": nn.Dropout(block.dropout)}

    first = {"attn": block.self_attn, **norms(block.self_attn_layer_norm)}
    second = {
        "up": block.fc1,
        "activation": block.activation_fn,
        "down": block.fc2,
        **norms(block.final_layer_norm),
    }
    make = Attention(base.config, "causal")
    return Block(first, _attend_opt, make), Block(second, _feed_opt, None)


# -- BLOOM, Falcon: biases by distance ---------------------------------------------


class _Bloom(Attention):
    """Gives the mask and the biases, ``(rows * heads, 1, length)``."""

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        biases = build_alibi_tensor(there, self.config.n_head, dtype=hidden.dtype)
        return super().make(hidden, there, **more), biases


class _Falcon(Attention):
    """Gives the mask, which is always made, and the biases, if the model has them."""

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        mask = super().make(hidden, there, **more)
        if mask is None:
            rows, length = there.shape
            mask = there.new_ones(length, length).tril().expand(rows, 1, -1, -1)
        if not self.config.alibi:
            return mask, None
        heads, least = self.config.num_attention_heads, torch.finfo(hidden.dtype).min
        biases = build_alibi_tensor(there, heads, dtype=hidden.dtype)
        biases = biases.reshape(hidden.shape[0], heads, 1, -1)
        if mask.dtype == torch.bool:
            mask = torch.where(mask, hidden.new_zeros(()), least)
        scaled = biases / math.sqrt(self.config.hidden_size // heads)
        return scaled.masked_fill(mask < -1, least), biases


def _call_biased(own: Any, hidden: Tensor, masks: Any, **extra: Any) -> Any:
    mask, biases = (None, None) if masks is None else masks
    more = _placed(hidden, extra)
    return own.block(hidden, attention_mask=mask, alibi=biases, **more)[0]


def _whole_bloom(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, _call_biased, _Bloom(base.config, "causal"))


def _attend_bloom(own: Any, hidden: Tensor, masks: Any, normed: bool) -> Any:
    value, (mask, biases) = own.norm(hidden), masks
    rest = value if normed else hidden
    return own.attn(value, rest, attention_mask=mask, alibi=biases)[0]


def _feed_bloom(own: Any, hidden: Tensor, _: Any, normed: bool) -> Any:
    value = own.norm(hidden)
    return own.mlp(value, value if normed else hidden)


def _halves_bloom(base: Any, block: Any, _: int) -> tuple[Block, ...]:
    normed = block.apply_residual_connection_post_layernorm
    first = {"norm": block.input_layernorm, "attn": block.self_attention}
    second = {"norm": block.post_attention_layernorm, "mlp": block.mlp}
    attend = functools.partial(_attend_bloom, normed=normed)
    feed = functools.partial(_feed_bloom, normed=normed)
    make = _Bloom(base.config, "causal")
    return Block(first, attend, make), Block(second, feed, None)


def _whole_falcon(base: Any, block: Any, _: int) -> Block:
    make = _Falcon(base.config, "causal")
    return Block({"block": block}, _call_biased, make, base.rotary_emb)


def _halves_falcon(base: Any, block: Any, index: int) -> tuple[Block, ...]:
    return (_whole_falcon(base, block, index),)


# -- by model type -----------------------------------------------------------------

_LLAMA = _Form()
_WINDOW = _Form(masks="window")
_TYPES = _Form(masks="types")
_GEMMA2 = _Form(
    attention=("input_layernorm", "self_attn", "post_attention_layernorm"),
    feed=("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    masks="types",
)
_OLMO2 = _Form(
    attention=("", "self_attn", "post_attention_layernorm"),
    feed=("", "mlp", "post_feedforward_layernorm"),
)
_GRANITE = _Form(
    after="embedding_multiplier",
    attention=("input_layernorm", "self_attn", "residual_multiplier"),
    feed=("post_attention_layernorm", "mlp", "residual_multiplier"),
)
_GPT2 = dataclasses.replace(
    _family(
        _Form(layers="h", attention=("ln_1", "attn", ""), feed=("ln_2", "mlp", "")),
        ("ln_f",),
        fp32_token_loss=False,
    ),
    embed=_embed_gpt2,
)
_GPTJ = _Form(tokens="wte", after="drop", layers="h", parallel="always")
_BLOOM = _Form(tokens="word_embeddings", after="word_embeddings_layernorm", layers="h")
_FALCON = _Form(tokens="word_embeddings", layers="h")

FAMILIES: dict[str, Family] = {
    "apertus": _family(
        _Form(
            attention=("attention_layernorm", "self_attn", ""),
            feed=("feedforward_layernorm", "mlp", ""),
        )
    ),
    "arcee": _family(_LLAMA),
    "bloom": dataclasses.replace(
        _family(_BLOOM, ("ln_f",), fp32_token_loss=False),
        whole=_whole_bloom,
        halves=_halves_bloom,
    ),
    "cohere": _family(_Form(parallel="always")),
    "cohere2": _family(_Form(masks="types", parallel="always")),
    "deepseek_v2": _family(_LLAMA),
    "deepseek_v3": _family(_LLAMA),
    "ernie4_5": _family(_LLAMA),
    "exaone4": _family(dataclasses.replace(_OLMO2, masks="types")),
    "falcon": dataclasses.replace(
        _family(_FALCON, ("ln_f",), fp32_token_loss=False),
        whole=_whole_falcon,
        halves=_halves_falcon,
    ),
    "gemma": _family(_LLAMA),
    "gemma2": _family(_GEMMA2),
    "gemma3_text": _family(_GEMMA2),
    "glm": _family(_LLAMA),
    "glm4": _family(
        _Form(
            attention=("input_layernorm", "self_attn", "post_self_attn_layernorm"),
            feed=("post_attention_layernorm", "mlp", "post_mlp_layernorm"),
        )
    ),
    "glm4_moe": _family(_LLAMA),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_neox": _family(
        _Form(
            tokens="embed_in",
            after="emb_dropout",
            attention=("input_layernorm", "attention", "post_attention_dropout"),
            feed=("post_attention_layernorm", "mlp", "post_mlp_dropout"),
            parallel="use_parallel_residual",
        ),
        ("final_layer_norm",),
    ),
    "gpt_oss": _family(_TYPES),
    "gptj": dataclasses.replace(
        _family(_GPTJ, ("ln_f",)), whole=_whole_gptj, halves=_halves_gptj
    ),
    "granite": _family(_GRANITE),
    "granitemoe": _family(
        dataclasses.replace(
            _GRANITE,
            feed=(
                "post_attention_layernorm",
                "block_sparse_moe",
                "residual_multiplier",
            ),
        )
    ),
    "helium": _family(_LLAMA),
    "hunyuan_v1_dense": _family(_LLAMA),
    "llama": _family(_LLAMA),
    "ministral": _family(_TYPES),
    "ministral3": _family(_WINDOW),
    "mistral": _family(_WINDOW),
    "mixtral": _family(_WINDOW),
    "nemotron": _family(_LLAMA),
    "olmo": _family(_LLAMA),
    "olmo2": _family(_OLMO2),
    "olmo3": _family(dataclasses.replace(_OLMO2, masks="types")),
    "olmoe": _family(_LLAMA),
    "opt": dataclasses.replace(
        _family(_LLAMA, ("decoder.final_layer_norm", "decoder.project_out")),
        embed=_embed_opt,
        blocks=lambda base: base.decoder.layers,
        halves=_halves_opt,
    ),
    "phi": _family(
        _Form(after="embed_dropout", parallel="always"), ("final_layernorm",)
    ),
    "phi3": _family(
        _Form(
            attention=("input_layernorm", "self_attn", "resid_attn_dropout"),
            feed=("post_attention_layernorm", "mlp", "resid_mlp_dropout"),
            masks="window",
        )
    ),
    "qwen2": _family(_TYPES),
    "qwen2_moe": _family(_TYPES),
    "qwen3": _family(_TYPES),
    "qwen3_moe": _family(_WINDOW),
    "seed_oss": _family(_LLAMA),
    "smollm3": _family(_TYPES),
    "stablelm": _family(
        _Form(
            feed=("post_attention_layernorm", "mlp", "dropout"),
            parallel="use_parallel_residual",
        )
    ),
    "starcoder2": _family(_Form(after="embedding_dropout", masks="window")),
}
