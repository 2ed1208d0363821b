"""Small models of images and videos: configs, and classes by task."""

import torch

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
_IMAGES = {"image-classification": "ForImageClassification"}
FAMILIES = {"ViT": (_VIT, _IMAGES), "DeiT": (_VIT, _IMAGES)}

_DINOV2 = {**_VIT, "drop_path_rate": 0.0}
_BEIT = {
    **_DINOV2,
    "use_relative_position_bias": True,
    "layer_scale_init_value": 0.1,
    "use_mask_token": True,
}
_CLIP = {
    "vision_config": {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
        "attention_dropout": 0.0,
    },
    "text_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 9,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "num_labels": 3,
}
_SWIN = {
    "image_size": 8,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "num_labels": 3,
}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [2, 2],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [2, 2],
    "mlp_ratios": [2, 2],
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "num_labels": 3,
}
_CONVNEXT = {
    "patch_size": 2,
    "num_stages": 2,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "num_labels": 3,
}
_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "layer_type": "basic",
    "num_labels": 3,
}
_REGNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "groups_width": 4,
    "num_labels": 3,
}
IMAGES = {
    "ViTMSN": (_VIT, _IMAGES),
    "IJepa": (_VIT, _IMAGES),
    "Dinov2": (_DINOV2, _IMAGES),
    "Dinov2WithRegisters": ({**_DINOV2, "num_register_tokens": 2}, _IMAGES),
    "Beit": (_BEIT, _IMAGES),
    "Data2VecVision": (_BEIT, _IMAGES),
    "CLIP": (_CLIP, _IMAGES),
    "MetaClip2": (_CLIP, _IMAGES),
    "Siglip": (_CLIP, _IMAGES),
    "VideoMAE": (
        {**_VIT, "num_frames": 4},
        {"video-classification": "ForVideoClassification"},
    ),
    "Swin": (_SWIN, _IMAGES),
    "Swinv2": (_SWIN, _IMAGES),
    "Segformer": (_SEGFORMER, _IMAGES),
    "ConvNext": (_CONVNEXT, _IMAGES),
    "ConvNextV2": (_CONVNEXT, _IMAGES),
    "ResNet": (_RESNET, _IMAGES),
    "RegNet": (_REGNET, _IMAGES),
}
"""Those whose promises `test_vision_families` proves."""


def make_pixels(name, rows=4, dtype=torch.float32):
    """Return a batch of images, of videos for a model of videos."""
    numbers = torch.Generator().manual_seed(2)
    shape = (4, 3, 8, 8) if name == "VideoMAE" else (3, 8, 8)
    pixels = torch.randn(rows, *shape, generator=numbers, dtype=dtype)
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 3}
