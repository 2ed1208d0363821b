"""Small causal language models: configs, and classes by task."""

from tests.adapters.hf_encoders import WORDS

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
}
_LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": WORDS,
    "head_dim": 8,
}
FAMILIES = {
    "GPT2": (_GPT2, {"causal-lm": "LMHeadModel"}),
    "Llama": (_LLAMA, {"causal-lm": "ForCausalLM"}),
    "Qwen2": (_LLAMA, {"causal-lm": "ForCausalLM"}),
    "Qwen3": (_LLAMA, {"causal-lm": "ForCausalLM"}),
}
