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


_VIDEOS = {"video-classification": "ForVideoClassification"}
_DROPLESS = {"drop_path_rate": 0.0, "num_labels": 3}
_EFFICIENTNET = {
    "width_coefficient": 0.25,
    "depth_coefficient": 1.0,
    "in_channels": (32, 16, 24),
    "out_channels": (16, 24, 40),
    "kernel_sizes": (3, 3, 5),
    "strides": (1, 2, 2),
    "num_block_repeats": (1, 2, 1),
    "expand_ratios": (1, 2, 2),
    "hidden_dim": 320,
    "drop_connect_rate": 0.0,
    "dropout_rate": 0.0,
    "num_labels": 3,
}
_MOBILENET = {
    "depth_multiplier": 0.25,
    "classifier_dropout_prob": 0.0,
    "num_labels": 3,
}
_MOBILEVIT = {
    "hidden_sizes": (8, 12, 16),
    "neck_hidden_sizes": (4, 4, 6, 8, 8, 8, 16),
    "num_attention_heads": 2,
    "expand_ratio": 1.0,
    "hidden_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
    "num_labels": 3,
}
_MOBILEVITV2 = {
    "width_multiplier": 0.25,
    "n_attn_blocks": (1, 2, 1),
    "base_attn_unit_dims": (32, 32, 64),
    "classifier_dropout_prob": 0.0,
    "num_labels": 3,
}
_LEVIT = {
    "image_size": 32,
    "hidden_sizes": (16, 24, 32),
    "num_attention_heads": (1, 2, 2),
    "depths": (1, 2, 1),
    "key_dim": (8, 8, 8),
    "drop_path_rate": 0,
    "num_labels": 3,
}
_POOLFORMER = {
    "num_encoder_blocks": 2,
    "depths": (2, 1),
    "hidden_sizes": (8, 16),
    "patch_sizes": (3, 3),
    "strides": (2, 2),
    "padding": (1, 1),
    "layer_scale_init_value": 0.1,
    **_DROPLESS,
}
_PVT = {
    "image_size": 16,
    "num_encoder_blocks": 2,
    "depths": (2, 2),
    "hidden_sizes": (8, 16),
    "strides": (4, 2),
    "num_attention_heads": (1, 2),
    "mlp_ratios": (2, 2),
    **_DROPLESS,
}
_BIT = {
    "embedding_size": 8,
    "hidden_sizes": (8, 16),
    "depths": (2, 2),
    "num_groups": 2,
    **_DROPLESS,
}
_FOCALNET = {
    "image_size": 8,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": (2, 1),
    "focal_levels": (1, 1),
    "focal_windows": (3, 3),
    **_DROPLESS,
}
_CVT = {
    "patch_sizes": (3, 3),
    "patch_stride": (2, 2),
    "patch_padding": (1, 1),
    "embed_dim": (8, 16),
    "num_heads": (1, 2),
    "depth": (1, 3),
    "mlp_ratio": (2.0, 2.0),
    "attention_drop_rate": (0.0, 0.0),
    "drop_rate": (0.0, 0.0),
    "drop_path_rate": (0.0, 0.0),
    "qkv_bias": (True, True),
    "cls_token": (False, True),
    "qkv_projection_method": ("dw_bn", "dw_bn"),
    "kernel_qkv": (3, 3),
    "padding_kv": (1, 1),
    "stride_kv": (2, 2),
    "padding_q": (1, 1),
    "stride_q": (1, 1),
    "num_labels": 3,
}
_SWIFTFORMER = {
    "depths": (2, 1, 2),
    "embed_dims": (8, 12, 16),
    "downsamples": (True, True, True),
    "mlp_ratio": 2,
    "layer_scale_init_value": 0.1,
    **_DROPLESS,
}
_HGNET = {
    "depths": (1, 2),
    "hidden_sizes": (16, 16),
    "stem_channels": (3, 8, 8),
    "stage_in_channels": (8, 16),
    "stage_mid_channels": (8, 8),
    "stage_out_channels": (16, 16),
    "stage_num_blocks": (1, 2),
    "stage_downsample": (False, True),
    "stage_downsample_strides": (2, 2),
    "stage_light_block": (False, True),
    "stage_kernel_size": (3, 3),
    "stage_numb_of_layers": (1, 2),
    "num_labels": 3,
}
_TEXTNET = {
    "stem_out_channels": 8,
    "conv_layer_kernel_sizes": [[[3, 3], [3, 1]], [[1, 3], [3, 3]]],
    "conv_layer_strides": [[1, 2], [1, 1]],
    "hidden_sizes": (8, 12, 16),
    "depths": (1, 1),
    "num_labels": 3,
}
_HIERA = {
    "image_size": (16, 16),
    "patch_size": (3, 3),
    "patch_stride": (2, 2),
    "patch_padding": (1, 1),
    "embed_dim": 8,
    "mlp_ratio": 2.0,
    "depths": (1, 2, 1),
    "num_heads": (1, 2, 2),
    "num_query_pool": 2,
    "masked_unit_size": (4, 4),
    "masked_unit_attention": (True, False, False),
    **_DROPLESS,
}
_SIGLIP2 = {
    **_CLIP,
    "vision_config": {**_CLIP["vision_config"], "num_patches": 9, "patch_size": 2},
}
_VIVIT = {**_VIT, "num_frames": 4, "tubelet_size": (2, 4, 4)}
_VJEPA2 = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "mlp_ratio": 2.0,
    "crop_size": 8,
    "patch_size": 4,
    "frames_per_clip": 4,
    "num_pooler_layers": 1,
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 1,
    **_DROPLESS,
}
MORE = {
    "EfficientNet": (_EFFICIENTNET, _IMAGES),
    "MobileNetV1": (_MOBILENET, _IMAGES),
    "MobileNetV2": (_MOBILENET, _IMAGES),
    "MobileViT": (_MOBILEVIT, _IMAGES),
    "MobileViTV2": (_MOBILEVITV2, _IMAGES),
    "Levit": (_LEVIT, _IMAGES),
    "Cvt": (_CVT, _IMAGES),
    "SwiftFormer": (_SWIFTFORMER, _IMAGES),
    "HGNetV2": (_HGNET, _IMAGES),
    "TextNet": (_TEXTNET, _IMAGES),
    "PoolFormer": (_POOLFORMER, _IMAGES),
    "Pvt": (
        {**_PVT, "patch_sizes": (4, 2), "sequence_reduction_ratios": (2, 1)},
        _IMAGES,
    ),
    "PvtV2": ({**_PVT, "patch_sizes": (7, 3), "sr_ratios": (2, 1)}, _IMAGES),
    "Hiera": (_HIERA, _IMAGES),
    "Bit": (_BIT, _IMAGES),
    "FocalNet": (_FOCALNET, _IMAGES),
    "DonutSwin": (_SWIN, _IMAGES),
    "Siglip2": (_SIGLIP2, _IMAGES),
    "Timesformer": ({**_VIT, "num_frames": 4}, _VIDEOS),
    "Vivit": (_VIVIT, _VIDEOS),
    "VJEPA2": (_VJEPA2, _VIDEOS),
}
"""Those whose promises `test_more_vision_and_sound` proves."""

_SIZES = {
    **dict.fromkeys(("MobileNetV1", "MobileNetV2", "MobileViT", "MobileViTV2"), 64),
    **dict.fromkeys(("EfficientNet", "Levit", "SwiftFormer", "HGNetV2", "TextNet"), 32),
    **dict.fromkeys(("Pvt", "PvtV2", "Hiera", "Cvt", "Bit"), 16),
}


def make_pixels(name, rows=4, dtype=torch.float32):
    """Return a batch of images, of videos for a model of videos."""
    numbers = torch.Generator().manual_seed(2)
    entry = "pixel_values_videos" if name == "VJEPA2" else "pixel_values"
    size = _SIZES.get(name, 8)
    video = name in ("VideoMAE", "Timesformer", "Vivit", "VJEPA2")
    shape = (4, 3, size, size) if video else (3, size, size)
    labels = torch.arange(rows) % 3
    if name == "Siglip2":  # patches of images of several shapes, padded to 9
        shapes = torch.tensor([[3, 3], [2, 4], [1, 5], [4, 2]])[torch.arange(rows) % 4]
        there = torch.arange(9)[None] < shapes.prod(1)[:, None]
        pixels = torch.randn(rows, 9, 12, generator=numbers, dtype=dtype)
        return {
            "pixel_values": pixels * there[..., None],
            "pixel_attention_mask": there.int(),
            "spatial_shapes": shapes,
            "labels": labels,
        }
    pixels = torch.randn(rows, *shape, generator=numbers, dtype=dtype)
    return {entry: pixels, "labels": labels}
