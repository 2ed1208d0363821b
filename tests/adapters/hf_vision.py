"""Small models of images: configs, and classes by task."""

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
FAMILIES = {
    "ViT": (_VIT, {"image-classification": "ForImageClassification"}),
    "DeiT": (_VIT, {"image-classification": "ForImageClassification"}),
}
