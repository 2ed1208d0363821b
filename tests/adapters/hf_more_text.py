"""More small models of text: configs for `hf_decoders`, and for `hf_encoders`."""

from tests.adapters.hf_small import PADDING, SMALL_BERT, WORDS

_SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": 2}
_FORM = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": WORDS,
    "head_dim": 8,
    **_SPECIAL,
}
_TYPES = {
    **_FORM,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_CONV = {
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
_MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_MAMBA = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "state_size": 4,
    "vocab_size": WORDS,
    **_SPECIAL,
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_state": 4,
    "mamba_d_head": 8,
    "mamba_chunk_size": 4,
}
_GPT = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": WORDS,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    **_SPECIAL,
}
_NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "dropout": 0.0,
}
DECODERS = {
    "bamba": {**_FORM, **_MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {**_FORM, **_NO_DROPOUT},
    "bitnet": _FORM,
    "codegen": {**_GPT, "rotary_dim": 4, "n_ctx": 32, "n_head": 4},
    "cwm": _TYPES,
    "diffllama": {**_FORM, "num_attention_heads": 4, "num_key_value_heads": 2},
    "dots1": {**_TYPES, **_ROUTED},
    "ernie4_5_moe": {
        **_FORM,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 8,
        "moe_layer_start_index": 1,
    },
    "exaone_moe": {**_TYPES, **_EXPERTS, "num_shared_experts": 1},
    "falcon_mamba": _MAMBA,
    "flex_olmo": {**_FORM, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        **_FORM,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "final_logit_softcapping": 30.0,
    },
    "glm4_moe_lite": {**_FORM, **_ROUTED, **_LATENT},
    "gpt_neox_japanese": {**_FORM, **_NO_DROPOUT},
    "granitemoehybrid": {
        **_FORM,
        **_MULTIPLIED,
        **_LOCAL,
        **_MAMBA2,
        "shared_intermediate_size": 8,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "granitemoeshared": {
        **_FORM,
        **_MULTIPLIED,
        **_LOCAL,
        "shared_intermediate_size": 8,
    },
    "hunyuan_v1_moe": {**_FORM, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": {**_FORM, **_MULTIPLIED},
    "jais2": _FORM,
    "jamba": {
        **_FORM,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {**_FORM, **_LOCAL, "kv_channels": 8},
    "lfm2": {**_FORM, **_CONV},
    "lfm2_moe": {**_FORM, **_CONV, **_EXPERTS, "num_dense_layers": 1},
    "mamba": _MAMBA,
    "mamba2": {**_MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "mellum": {**_TYPES, **_EXPERTS},
    "mimo_v2_flash": {**_TYPES, **_ROUTED},
    "minicpm3": {**_FORM, **_LATENT},
    "minimax_m2": {**_FORM, **_LOCAL},
    "modernbert-decoder": {
        **_TYPES,
        "local_attention": 4,
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
    "mpt": {
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 3,
        "vocab_size": WORDS,
        "max_seq_len": 32,
        **_SPECIAL,
    },
    "nanochat": _FORM,
    "nemotron_h": {
        **_FORM,
        **_ROUTED,
        "layers_block_type": ["mamba", "moe", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 2,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 8,
    },
    "olmo_hybrid": {**_FORM, **_LINEAR, "num_key_value_heads": 2},
    "openai-gpt": {**_GPT, "n_positions": 32},
    "persimmon": {**_FORM, "hidden_dropout": 0.0},
    "phimoe": {
        **_FORM,
        **_LOCAL,
        "sliding_window": 4,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
    },
    "qwen3_5_moe_text": {**_FORM, **_LINEAR, **_EXPERTS},
    "qwen3_5_text": {**_FORM, **_LINEAR},
    "qwen3_next": {**_FORM, **_LINEAR, **_EXPERTS},
    "solar_open": {**_FORM, **_ROUTED},
    "vaultgemma": _TYPES,
    "xglm": {
        "d_model": 16,
        "num_layers": 3,
        "attention_heads": 2,
        "ffn_dim": 32,
        "vocab_size": WORDS,
        "layerdrop": 0.0,
        "max_position_embeddings": 32,
        **_NO_DROPOUT,
        **_SPECIAL,
    },
    "youtu": {**_FORM, **_LATENT},
}
_TEXT = {
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "masked-lm": "ForMaskedLM",
    "multiple-choice": "ForMultipleChoice",
}
_NO_CHOICES = {task: _TEXT[task] for task in _TEXT if task != "multiple-choice"}
_FEW = {task: _TEXT[task] for task in _NO_CHOICES if task != "question-answering"}
_NO_SUMMARY = {"summary_last_dropout": 0.0}
_ROTARY = {
    **{name: SMALL_BERT[name] for name in list(SMALL_BERT)[:6]},
    **_SPECIAL,
    "classifier_dropout": 0.0,
}
ENCODERS = {
    "BigBird": ({**SMALL_BERT, **_SPECIAL, "attention_type": "original_full"}, _FEW),
    "ConvBert": (
        {**SMALL_BERT, **_NO_SUMMARY, "embedding_size": 8, "conv_kernel_size": 3},
        _TEXT,
    ),
    "Esmc": ({**_ROTARY, "mask_token_id": 3}, _FEW),
    "MobileBert": (
        {
            **SMALL_BERT,
            "embedding_size": 8,
            "true_hidden_size": 8,
            "intra_bottleneck_size": 8,
            "num_feedforward_networks": 2,
        },
        _TEXT,
    ),
    "RoFormer": ({**SMALL_BERT, **_NO_SUMMARY, "embedding_size": 8}, _TEXT),
    "Ultrabert": (
        {
            **_ROTARY,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 2,
        },
        _NO_CHOICES,
    ),
    "OpenAIPrivacyFilter": (
        {
            **_ROTARY,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"token-classification": "ForTokenClassification"},
    ),
}
