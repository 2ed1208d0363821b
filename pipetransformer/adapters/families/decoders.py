"""Causal language models, and classifiers and readers made of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapters.families.decoder_parts import (
    Form,
    Tokens,
    around,
    check,
    family,
    first_of,
    halves,
    placed,
)
from pipetransformer.adapters.families.parts import (
    Attention,
    Block,
    Embed,
    Family,
    positions,
)

# -- GPT-2, GPT-J, CodeGen ---------------------------------------------------------


def _call_gpt2_embeddings(own: Any, ids: Tensor, _: Tensor) -> Any:
    value = own.wte(ids)
    return own.drop(value + own.wpe(positions(value)))


def _embed_gpt2(base: Any) -> Embed:
    check(base.config)
    parts = {"wte": base.wte, "wpe": base.wpe, "drop": base.drop}
    return Tokens(parts, _call_gpt2_embeddings, base.config)


def _call_gptj(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    # Before transformers 5.24 they made their rotary embeddings of the positions.
    extra["position_ids"] = positions(hidden)
    return first_of(own.block(hidden, attention_mask=mask, **extra))


def _whole_gptj(base: Any, block: Any, index: int) -> Block:
    return Block({"block": block}, _call_gptj, *around(base, index, _GPTJ))


# -- OPT ---------------------------------------------------------------------------


def _call_opt_embeddings(own: Any, ids: Tensor, there: Tensor) -> Any:
    return own.project(own.tokens(ids)) + own.places(there)


def _embed_opt(base: Any) -> Embed:
    check(base.config)
    decoder = base.decoder
    parts = {
        "tokens": decoder.embed_tokens,
        "places": decoder.embed_positions,
        "project": decoder.project_in or nn.Identity(),
    }
    return Tokens(parts, _call_opt_embeddings, base.config)


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


# -- BioGPT, XGLM: positions that are added ----------------------------------------


def _call_biogpt_embeddings(own: Any, ids: Tensor, there: Tensor) -> Any:
    value = own.tokens(ids)
    return own.dropout(value + own.places(there, position_ids=positions(value)))


def _call_xglm_embeddings(own: Any, ids: Tensor, _: Tensor) -> Any:
    value = own.tokens(ids)
    return own.dropout(value + own.places(positions(value)))


def _embed_placed(base: Any, call: Any) -> Embed:
    check(base.config)
    parts = {
        "tokens": base.embed_tokens,
        "places": base.embed_positions,
        "dropout": nn.Dropout(base.dropout),
    }
    return Tokens(parts, call, base.config)


# -- GPT: norms behind -------------------------------------------------------------


class _First(Attention):
    """Gives what is added to the scores: the least number at padding."""

    def make(self, hidden: Tensor, there: Tensor, **_: Any) -> Any:
        absent = 1.0 - there[:, None, None].to(hidden.dtype)
        return absent * torch.finfo(hidden.dtype).min


def _embed_gpt(base: Any) -> Embed:
    check(base.config)
    parts = {"wte": base.tokens_embed, "wpe": base.positions_embed, "drop": base.drop}
    return Tokens(parts, _call_gpt2_embeddings, base.config)


def _call_gpt(own: Any, hidden: Tensor, mask: Any) -> Any:
    return own.block(hidden, mask)[0]


def _attend_gpt(own: Any, hidden: Tensor, mask: Any) -> Any:
    return own.norm(hidden + own.attn(hidden, mask)[0])


def _feed_gpt(own: Any, hidden: Tensor, _: Any) -> Any:
    return own.norm(hidden + own.mlp(hidden))


def _whole_gpt(base: Any, block: Any, _: int) -> Block:
    block.mlp.act = copy.copy(block.mlp.act)  # all blocks have the same one
    return Block({"block": block}, _call_gpt, _First(base.config, "causal"))


def _halves_gpt(base: Any, block: Any, _: int) -> tuple[Block, ...]:
    block.mlp.act = copy.copy(block.mlp.act)  # all blocks have the same one
    first = {"attn": block.attn, "norm": block.ln_1}
    second = {"mlp": block.mlp, "norm": block.ln_2}
    make = _First(base.config, "causal")
    return Block(first, _attend_gpt, make), Block(second, _feed_gpt, None)


# -- nanochat: a norm without weights behind the embeddings ------------------------


def _call_normed(own: Any, ids: Tensor, _: Tensor) -> Any:
    return own.norm(own.tokens(ids))


def _embed_nanochat(base: Any) -> Embed:
    check(base.config)
    # The model's own norm is that behind the blocks as well.
    parts = {"tokens": base.embed_tokens, "norm": copy.deepcopy(base.norm)}
    return Tokens(parts, _call_normed, base.config)


# -- Granite: an MLP beside the experts --------------------------------------------


def _feed_granite(own: Any, hidden: Tensor, _: Any, factor: float) -> Any:
    value = own.norm(hidden)
    if hasattr(own, "experts"):
        found = own.experts(value)
        value = found + own.mlp(value) if hasattr(own, "mlp") else found
    else:
        value = own.mlp(value)
    return hidden + value * factor


def _halves_granite(
    base: Any, block: Any, index: int, form: Form
) -> tuple[nn.Module, ...]:
    first, _ = halves(base, block, index, form)
    found = {
        "norm": block.post_attention_layernorm,
        "experts": block.block_sparse_moe,
        "mlp": block.shared_mlp,
    }
    second = {name: part for name, part in found.items() if part is not None}
    feed = functools.partial(_feed_granite, factor=block.residual_multiplier)
    return first, Block(second, feed, None)


# -- Gemma 4 -----------------------------------------------------------------------


def _call_gemma4(own: Any, hidden: Tensor, mask: Any, **extra: Any) -> Any:
    more = placed(hidden, extra)
    # Blocks store keys and values for others; none reads them, as `check` sees to.
    return own.block(hidden, shared_kv_states={}, attention_mask=mask, **more)


def _whole_gemma4(base: Any, block: Any, index: int) -> Block:
    return Block({"block": block}, _call_gemma4, *around(base, index, _TYPES))


# -- BLOOM, MPT, Falcon: biases by distance ----------------------------------------


class _Bloom(Attention):
    """Gives the mask and the biases, ``(rows * heads, 1, length)``."""

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        biases = build_alibi_tensor(there, self.config.n_head, dtype=hidden.dtype)
        return super().make(hidden, there, **more), biases


class _Mpt(Attention):
    """Gives the mask, True where nothing is read, and the biases by distance."""

    def make(self, hidden: Tensor, there: Tensor, **more: Any) -> Any:
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        heads, most = self.config.n_heads, self.config.max_seq_len
        biases = build_mpt_alibi_tensor(heads, most, device=hidden.device)
        return super().make(hidden, there, **more).bool(), biases


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
    more = placed(hidden, extra)
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


def _call_mpt(own: Any, hidden: Tensor, masks: Any) -> Any:
    mask, biases = masks
    return own.block(hidden, position_bias=biases, attention_mask=mask)[0]


def _attend_mpt(own: Any, hidden: Tensor, masks: Any) -> Any:
    mask, biases = masks
    given = {"position_bias": biases, "attention_mask": mask}
    return own.dropout(own.attn(own.norm(hidden), **given)[0]) + hidden


def _feed_mpt(own: Any, hidden: Tensor, _: Any) -> Any:
    return own.mlp(own.norm(hidden), hidden)


def _whole_mpt(base: Any, block: Any, _: int) -> Block:
    return Block({"block": block}, _call_mpt, _Mpt(base.config, "causal"))


def _halves_mpt(base: Any, block: Any, _: int) -> tuple[Block, ...]:
    first = {
        "norm": block.norm_1,
        "attn": block.attn,
        "dropout": block.resid_attn_dropout,
    }
    second = {"norm": block.norm_2, "mlp": block.ffn}
    make = _Mpt(base.config, "causal")
    return Block(first, _attend_mpt, make), Block(second, _feed_mpt, None)


def _whole_falcon(base: Any, block: Any, _: int) -> Block:
    make = _Falcon(base.config, "causal")
    return Block({"block": block}, _call_biased, make, base.rotary_emb)


# -- by model type -----------------------------------------------------------------

_LLAMA = Form()
_WINDOW = Form(masks="window")
_TYPES = Form(masks="types")
_GEMMA2 = Form(
    attention=("input_layernorm", "self_attn", "post_attention_layernorm"),
    feed=("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    masks="types",
)
_OLMO2 = Form(
    attention=("", "self_attn", "post_attention_layernorm"),
    feed=("", "mlp", "post_feedforward_layernorm"),
)
_GRANITE = Form(
    after="embedding_multiplier",
    attention=("input_layernorm", "self_attn", "residual_multiplier"),
    feed=("post_attention_layernorm", "mlp", "residual_multiplier"),
)
_FC = "fc1 activation_fn activation_dropout fc2"
_PLACED = Form(
    attention=("self_attn_layer_norm", "self_attn", "dropout"),
    feed=("final_layer_norm", _FC, "dropout"),
)
_MAMBA = family(
    Form(tokens="embeddings", masks="padding", parallel="always"), ("norm_f",)
)
_LFM2 = Form(
    attention=("operator_norm", "self_attn", ""),
    recurrent=("operator_norm", "conv", ""),
    feed=("ffn_norm", "feed_forward", ""),
    masks="types",
)
_GRANITE_SHARED = dataclasses.replace(
    _GRANITE, feed=("post_attention_layernorm", "", "")
)
_BAMBA = Form(
    recurrent=("input_layernorm", "mamba", ""),
    feed=("pre_ff_layernorm", "feed_forward", ""),
    masks="types",
)
_HYBRID = dataclasses.replace(
    _GRANITE_SHARED,
    recurrent=("input_layernorm", "mamba", "residual_multiplier"),
    masks="types",
)
_GPT2 = dataclasses.replace(
    family(
        Form(layers="h", attention=("ln_1", "attn", ""), feed=("ln_2", "mlp", "")),
        ("ln_f",),
        fp32_token_loss=False,
    ),
    embed=_embed_gpt2,
)
_GPTJ = Form(tokens="wte", after="drop", layers="h", parallel="always")
_BLOOM = Form(tokens="word_embeddings", after="word_embeddings_layernorm", layers="h")
_FALCON = Form(tokens="word_embeddings", layers="h")

FAMILIES: dict[str, Family] = {
    "apertus": family(
        Form(
            attention=("attention_layernorm", "self_attn", ""),
            feed=("feedforward_layernorm", "mlp", ""),
        )
    ),
    "arcee": family(_LLAMA),
    "bamba": family(_BAMBA, ("final_layernorm",)),
    "biogpt": dataclasses.replace(
        family(_PLACED, ("layer_norm",), fp32_token_loss=False),
        embed=functools.partial(_embed_placed, call=_call_biogpt_embeddings),
    ),
    "bitnet": family(_LLAMA),
    "bloom": dataclasses.replace(
        family(_BLOOM, ("ln_f",), fp32_token_loss=False),
        whole=_whole_bloom,
        halves=_halves_bloom,
    ),
    "codegen": dataclasses.replace(
        family(_GPTJ, ("ln_f",)), whole=_whole_gptj, halves=None
    ),
    "cohere": family(Form(parallel="always")),
    "cohere2": family(Form(masks="types", parallel="always")),
    "cwm": family(_TYPES),
    "deepseek_v2": family(_LLAMA),
    "deepseek_v3": family(_LLAMA),
    "diffllama": family(_LLAMA),
    "dots1": family(_TYPES),
    "ernie4_5": family(_LLAMA),
    "ernie4_5_moe": family(_LLAMA),
    "exaone4": family(dataclasses.replace(_OLMO2, masks="types")),
    "exaone_moe": family(_TYPES),
    "falcon": dataclasses.replace(
        family(_FALCON, ("ln_f",), fp32_token_loss=False),
        whole=_whole_falcon,
        halves=None,
    ),
    "falcon_mamba": _MAMBA,
    "flex_olmo": family(_OLMO2),
    "gemma": family(_LLAMA),
    "gemma2": family(_GEMMA2),
    "gemma3_text": family(_GEMMA2),
    "gemma4_text": dataclasses.replace(
        family(_TYPES), whole=_whole_gemma4, halves=None
    ),
    "glm": family(_LLAMA),
    "glm4": family(
        Form(
            attention=("input_layernorm", "self_attn", "post_self_attn_layernorm"),
            feed=("post_attention_layernorm", "mlp", "post_mlp_layernorm"),
        )
    ),
    "glm4_moe": family(_LLAMA),
    "glm4_moe_lite": family(_LLAMA),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_neox": family(
        Form(
            tokens="embed_in",
            after="emb_dropout",
            attention=("input_layernorm", "attention", "post_attention_dropout"),
            feed=("post_attention_layernorm", "mlp", "post_mlp_dropout"),
            parallel="use_parallel_residual",
        ),
        ("final_layer_norm",),
    ),
    "gpt_neox_japanese": family(
        Form(tokens="embed_in", parallel="always"), ("final_layer_norm",)
    ),
    "gpt_oss": family(_TYPES),
    "gptj": dataclasses.replace(
        family(_GPTJ, ("ln_f",)), whole=_whole_gptj, halves=None
    ),
    "granite": family(_GRANITE),
    "granitemoe": family(
        dataclasses.replace(
            _GRANITE,
            feed=(
                "post_attention_layernorm",
                "block_sparse_moe",
                "residual_multiplier",
            ),
        )
    ),
    "granitemoehybrid": dataclasses.replace(
        family(_HYBRID), halves=functools.partial(_halves_granite, form=_HYBRID)
    ),
    "granitemoeshared": dataclasses.replace(
        family(_GRANITE_SHARED),
        halves=functools.partial(_halves_granite, form=_GRANITE_SHARED),
    ),
    "helium": family(_LLAMA),
    "hunyuan_v1_dense": family(_LLAMA),
    "hunyuan_v1_moe": family(_LLAMA),
    "hyperclovax": family(
        Form(
            after="embedding_multiplier",
            attention=(
                "input_layernorm",
                "self_attn",
                "post_norm1 residual_multiplier",
            ),
            feed=("post_attention_layernorm", "mlp", "post_norm2 residual_multiplier"),
        )
    ),
    "jais2": family(_LLAMA),
    "jamba": family(_BAMBA, ("final_layernorm",)),
    "jetmoe": family(Form(attention=("input_layernorm", "self_attention", ""))),
    "lfm2": family(_LFM2, ("embedding_norm",)),
    "lfm2_moe": family(
        dataclasses.replace(_LFM2, rotary="pos_emb"), ("embedding_norm",)
    ),
    "llama": family(_LLAMA),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mellum": family(_TYPES),
    "mimo_v2_flash": family(_TYPES),
    "minicpm3": family(
        Form(
            attention=("input_layernorm", "self_attn", "residual_scale"),
            feed=("post_attention_layernorm", "mlp", "residual_scale"),
        )
    ),
    "minimax_m2": family(_LLAMA),
    "ministral": family(_TYPES),
    "ministral3": family(_WINDOW),
    "mistral": family(_WINDOW),
    "mixtral": family(_WINDOW),
    "modernbert-decoder": family(
        Form(
            tokens="embeddings",
            attention=("attn_norm", "attn", ""),
            feed=("mlp_norm", "mlp", ""),
            masks="types",
        ),
        ("final_norm",),
    ),
    "mpt": dataclasses.replace(
        family(Form(tokens="wte", layers="blocks"), ("norm_f",), fp32_token_loss=False),
        whole=_whole_mpt,
        halves=_halves_mpt,
    ),
    "nanochat": dataclasses.replace(family(_LLAMA), embed=_embed_nanochat),
    "nemotron": family(_LLAMA),
    "nemotron_h": family(
        Form(tokens="embeddings", masks="types", parallel="always"), ("norm_f",)
    ),
    "olmo": family(_LLAMA),
    "olmo2": family(_OLMO2),
    "olmo3": family(dataclasses.replace(_OLMO2, masks="types")),
    "olmo_hybrid": family(Form(masks="types", parallel="always")),
    "olmoe": family(_LLAMA),
    "openai-gpt": dataclasses.replace(
        family(Form(layers="h"), ()),
        embed=_embed_gpt,
        whole=_whole_gpt,
        halves=_halves_gpt,
    ),
    "opt": dataclasses.replace(
        family(_LLAMA, ("decoder.final_layer_norm", "decoder.project_out")),
        embed=_embed_opt,
        blocks=lambda base: base.decoder.layers,
        halves=_halves_opt,
    ),
    "persimmon": family(
        Form(feed=("post_attention_layernorm", "mlp", "dropout")), ("final_layernorm",)
    ),
    "phi": family(Form(after="embed_dropout", parallel="always"), ("final_layernorm",)),
    "phi3": family(
        Form(
            attention=("input_layernorm", "self_attn", "resid_attn_dropout"),
            feed=("post_attention_layernorm", "mlp", "resid_mlp_dropout"),
            masks="window",
        )
    ),
    "phimoe": family(_WINDOW),
    "qwen2": family(_TYPES),
    "qwen2_moe": family(_TYPES),
    "qwen3": family(_TYPES),
    "qwen3_5_moe_text": family(_TYPES),
    "qwen3_5_text": family(_TYPES),
    "qwen3_moe": family(_WINDOW),
    "qwen3_next": family(_TYPES),
    "seed_oss": family(_LLAMA),
    "smollm3": family(_TYPES),
    "solar_open": family(_LLAMA),
    "stablelm": family(
        Form(
            feed=("post_attention_layernorm", "mlp", "dropout"),
            parallel="use_parallel_residual",
        )
    ),
    "starcoder2": family(Form(after="embedding_dropout", masks="window")),
    "vaultgemma": family(
        Form(feed=("pre_feedforward_layernorm", "mlp", ""), masks="types")
    ),
    "xglm": dataclasses.replace(
        family(_PLACED, ("layer_norm",)),
        embed=functools.partial(_embed_placed, call=_call_xglm_embeddings),
    ),
    "youtu": family(_LLAMA),
}
