"""Small causal language models, and classifiers made of them: configs and classes."""

from tests.adapters.hf_more_text import DECODERS as MORE
from tests.adapters.hf_small import PADDING, WORDS

_GPT2 = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": WORDS,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": PADDING,
}
_LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": WORDS,
    "head_dim": 8,
    "pad_token_id": PADDING,
}
_CLASSES = {"sequence-classification": "ForSequenceClassification"}
FAMILIES = {
    "GPT2": (_GPT2, {"causal-lm": "LMHeadModel", **_CLASSES}),
    "Llama": (_LLAMA, {"causal-lm": "ForCausalLM", **_CLASSES}),
    "Qwen2": (_LLAMA, {"causal-lm": "ForCausalLM"}),
    "Qwen3": (_LLAMA, {"causal-lm": "ForCausalLM"}),
}

_SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": 2}
_FORM = {**_LLAMA, **_SPECIAL}
_WINDOW = {**_FORM, "sliding_window": 4}
_TURNS = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}
_TYPES = {
    **_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_SHARED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,  # the first block has one MLP
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_shared_experts": 1,
}
_MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_NEOX = {**_FORM, "rotary_pct": 0.5, "hidden_dropout": 0.0, "classifier_dropout": 0.0}
_BLOOM = {
    "hidden_size": 16,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": WORDS,
    "hidden_dropout": 0.0,
    **_SPECIAL,
}
_FALCON = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": WORDS,
    "hidden_dropout": 0.0,
    **_SPECIAL,
}
_GPT_NEO = {
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 3,
    "vocab_size": WORDS,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
    "resid_dropout": 0.0,
    "classifier_dropout": 0.0,
    **_SPECIAL,
}
_OPT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "vocab_size": WORDS,
    "word_embed_proj_dim": 16,
    "dropout": 0.0,
    **_SPECIAL,
}
DECODERS = {
    "apertus": _FORM,
    "arcee": _FORM,
    "bloom": _BLOOM,
    "cohere": _FORM,
    "cohere2": {**_WINDOW, "sliding_window_pattern": 2},
    "deepseek_v2": {**_FORM, **_SHARED, **_LATENT},
    "deepseek_v3": {**_FORM, **_SHARED, **_LATENT},
    "ernie4_5": _FORM,
    "exaone4": {**_WINDOW, "sliding_window_pattern": 2},
    "falcon": _FALCON,
    "gemma": _FORM,
    "gemma2": _WINDOW,
    "gemma3_text": {**_WINDOW, "sliding_window_pattern": 2},
    "glm": {**_FORM, "partial_rotary_factor": 0.5},
    "glm4": {**_FORM, "partial_rotary_factor": 0.5},
    "glm4_moe": {**_FORM, **_SHARED},
    "gpt2": {**_GPT2, "classifier_dropout": 0.0},
    "gpt_bigcode": {**_GPT2, "classifier_dropout": 0.0},
    "gpt_neo": _GPT_NEO,
    "gpt_neox": _NEOX,
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": {**_FORM, **_MULTIPLIED},
    "granitemoe": {
        **_FORM,
        **_MULTIPLIED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "helium": _FORM,
    "hunyuan_v1_dense": _FORM,
    "llama": _FORM,
    "ministral": _TYPES,
    "ministral3": {**_WINDOW, "rope_parameters": _SCALED},
    "mistral": _WINDOW,
    "mixtral": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": _FORM,
    "olmo": _FORM,
    "olmo2": _FORM,
    "olmo3": _TYPES,
    "olmoe": {**_FORM, **_EXPERTS},
    "opt": _OPT,
    "phi": {
        **_FORM,
        "num_key_value_heads": 2,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "phi3": _WINDOW,
    "qwen2": _TURNS,
    "qwen2_moe": {
        **_TURNS,
        **_EXPERTS,
        "max_window_layers": 2,
        "shared_expert_intermediate_size": 8,
    },
    "qwen3": _TURNS,
    "qwen3_moe": {**_TURNS, **_EXPERTS},
    "seed_oss": {**_FORM, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {**_TURNS, "no_rope_layers": [1, 0, 1]},
    "stablelm": _NEOX,
    "starcoder2": {**_WINDOW, "use_bias": True},
    **MORE,
}
"""Those whose promises `test_decoder_families` proves: configs by ``model_type``."""

AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
_OFF = {"use_cache": False, "classifier_dropout": 0.0, "tie_word_embeddings": False}


def decoder_config(kind, **changes):
    """Return a small config of a family by its ``model_type``."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**{**_OFF, **DECODERS[kind], **changes})


def make_decoder(kind, task="causal-lm", dtype=None, **changes):
    """Return a task model with drawn weights (norms and biases too), in eval mode."""
    import torch
    import transformers

    config = decoder_config(kind, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, AUTO[task]).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype or torch.float32).eval()
