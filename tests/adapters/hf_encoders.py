"""Small encoders of text: configs, and classes by task."""

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
_TEXT = {
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}
FAMILIES = {
    "Bert": (SMALL_BERT, _TEXT),
    "Roberta": (SMALL_BERT, _TEXT),
    "Electra": ({**SMALL_BERT, "embedding_size": 8}, _TEXT),
    "DistilBert": (_DISTILBERT, _TEXT),
}
