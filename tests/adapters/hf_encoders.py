"""Small encoders of text: configs, and classes by task."""

from tests.adapters.hf_more_text import ENCODERS as MORE
from tests.adapters.hf_small import PADDING, SMALL_BERT, WORDS

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

_ALL = {
    **_TEXT,
    "masked-lm": "ForMaskedLM",
    "multiple-choice": "ForMultipleChoice",
}
_NO_CHOICES = {task: _ALL[task] for task in _ALL if task != "multiple-choice"}
_FEW = {task: _ALL[task] for task in _NO_CHOICES if task != "question-answering"}
_MPNET = {**SMALL_BERT, "initializer_range": 0.5}  # so that distances matter
_DEBERTA = {**_MPNET, "type_vocab_size": 2, "pooler_dropout": 0.0}
_RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 6,
}
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
_MODERNBERT = {
    **{name: SMALL_BERT[name] for name in list(SMALL_BERT)[:6]},
    **_SPECIAL,
    "local_attention": 4,  # two tokens on each side
    "global_attn_every_n_layers": 2,
    "classifier_pooling": "mean",
}
_EUROBERT = {
    **{name: SMALL_BERT[name] for name in list(SMALL_BERT)[:6]},
    **_SPECIAL,
    "mask_token_id": 3,
    "num_key_value_heads": 1,
    "classifier_pooling": "late",
}
_ESM = {
    **SMALL_BERT,
    "mask_token_id": 3,
    "token_dropout": True,
    "position_embedding_type": "rotary",
    "emb_layer_norm_before": False,
}
ENCODERS = {
    "Bert": (SMALL_BERT, _ALL),
    "Roberta": (SMALL_BERT, _ALL),
    "Electra": (
        {**SMALL_BERT, "embedding_size": 8, "summary_last_dropout": 0.0},
        _ALL,
    ),
    "DistilBert": (_DISTILBERT, _ALL),
    "Camembert": (SMALL_BERT, _ALL),
    "Data2VecText": (SMALL_BERT, _ALL),
    "Ernie": ({**SMALL_BERT, "use_task_id": True}, _ALL),
    "MegatronBert": (SMALL_BERT, _ALL),
    "RemBert": (
        {
            **SMALL_BERT,
            "input_embedding_size": 8,
            "output_embedding_size": 24,
            "classifier_dropout_prob": 0.0,
        },
        _ALL,
    ),
    "RobertaPreLayerNorm": (SMALL_BERT, _ALL),
    "XLMRoberta": (SMALL_BERT, _ALL),
    "XLMRobertaXL": (SMALL_BERT, _ALL),
    "MPNet": (_MPNET, _ALL),
    "Deberta": ({**_DEBERTA, **_RELATIVE}, _NO_CHOICES),
    "DebertaV2": (
        {
            **_DEBERTA,
            **_RELATIVE,
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        _ALL,
    ),
    "ModernBert": (_MODERNBERT, _ALL),
    "EuroBert": (_EUROBERT, _FEW),
    "Gte": (SMALL_BERT, _FEW),
    "NomicBert": (SMALL_BERT, _FEW),
    "JinaEmbeddingsV3": (SMALL_BERT, _NO_CHOICES),
    "Esm": (_ESM, _FEW),
    **MORE,
}
"""Those whose promises `test_encoder_families` proves."""
