"""What the small models of text have in common."""

WORDS = 97
PADDING = 1

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
