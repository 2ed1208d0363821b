"""Small models of every supported family and task, and batches for them."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", reason="needs the extra 'transformers'"
)

WORDS = 97
PADDING = 1
LENGTHS = (9, 4, 7, 9)

SMALL_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": WORDS,
    "pad_token_id": PADDING,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DISTILBERT = {
    "dim": 16,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 32,
    "vocab_size": WORDS,
    "pad_token_id": PADDING,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
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
_TEXT = {
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}
_FAMILIES = {
    "Bert": (SMALL_BERT, _TEXT),
    "Roberta": (SMALL_BERT, _TEXT),
    "Electra": ({**SMALL_BERT, "embedding_size": 8}, _TEXT),
    "DistilBert": (_DISTILBERT, _TEXT),
    "ViT": (_VIT, {"image-classification": "ForImageClassification"}),
    "DeiT": (_VIT, {"image-classification": "ForImageClassification"}),
    "GPT2": (_GPT2, {"causal-lm": "LMHeadModel"}),
    "Llama": (_LLAMA, {"causal-lm": "ForCausalLM"}),
    "Qwen2": (_LLAMA, {"causal-lm": "ForCausalLM"}),
    "Qwen3": (_LLAMA, {"causal-lm": "ForCausalLM"}),
}
CASES = [(name, task) for name, (_, tasks) in _FAMILIES.items() for task in tasks]
"""(prefix of the classes, task)"""


def make_model(name, task, dtype=torch.float32, **changes):
    """Return a task model with drawn weights, in evaluation mode."""
    values, tasks = _FAMILIES[name]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, name + tasks[task])(config)
    return model.to(dtype).eval()


def make_batch(task, rows=4, dtype=torch.float32):
    """Return a batch as a data collator makes it, padded to its longest row."""
    drawn = torch.Generator().manual_seed(2)
    if task == "image-classification":
        pixels = torch.randn(rows, 3, 8, 8, generator=drawn, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 3}
    lengths = torch.tensor([LENGTHS[k % len(LENGTHS)] for k in range(rows)])
    there = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.randint(3, WORDS, there.shape, generator=drawn)
    batch = {
        "input_ids": torch.where(there, ids, PADDING),
        "attention_mask": there.long(),
    }
    if task == "sequence-classification":
        batch["labels"] = torch.arange(rows) % 2
    elif task == "token-classification":
        batch["labels"] = torch.where(there, ids % 2, -100)
    elif task == "causal-lm":
        batch["labels"] = torch.where(there, ids, -100)
    else:
        batch["start_positions"] = torch.arange(rows) % 3
        batch["end_positions"] = torch.arange(rows) % 3 + 1
    return batch
