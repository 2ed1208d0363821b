"""Small models of sound: configs, and classes by task."""

import torch

_WAVES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "conv_dim": (8, 8),
    "conv_stride": (3, 2),
    "conv_kernel": (5, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": 3,
    "vocab_size": 12,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
_SPECTROGRAM = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "frequency_stride": 4,
    "time_stride": 4,
    "max_length": 16,
    "num_mel_bins": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
_WHISPER = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 4,
    "num_mel_bins": 16,
    "classifier_proj_size": 8,
    "num_labels": 3,
    "vocab_size": 9,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_HEARS = {"sequence-classification": "ForSequenceClassification", "ctc": "ForCTC"}
_LISTENS = {"audio-classification": "ForAudioClassification"}
SOUNDS = {
    "Wav2Vec2": (_WAVES, _HEARS),
    "Hubert": (_WAVES, _HEARS),
    "UniSpeech": (_WAVES, _HEARS),
    "UniSpeechSat": (_WAVES, _HEARS),
    "Data2VecAudio": (_WAVES, _HEARS),
    "WavLM": (_WAVES, _HEARS),
    "AST": (_SPECTROGRAM, _LISTENS),
    "Whisper": (_WHISPER, _LISTENS),
}
"""Those whose promises `test_audio_families` proves."""

_CONFORMER = {
    **_WAVES,
    "conformer_conv_dropout": 0.0,
    "conv_depthwise_kernel_size": 3,
    "max_source_positions": 16,
}
_BERT = {
    "feature_projection_input_dim": 6,
    "left_max_position_embeddings": 4,
    "right_max_position_embeddings": 2,
}
_OF_WAVES = ("conv_dim", "conv_stride", "conv_kernel", "num_feat_extract_layers")
_BERT |= {name: value for name, value in _CONFORMER.items() if name not in _OF_WAVES}
MORE = {
    "SEW": ({**_WAVES, "squeeze_factor": 2}, _HEARS),
    "Wav2Vec2Conformer": (_CONFORMER, _HEARS),
    "Wav2Vec2Bert": (_BERT, _HEARS),
}
"""Those whose promises `test_more_vision_and_sound` proves."""

LENGTHS = (90, 41, 77, 90)
WORDS = ((1, 2, 3), (4, -100, -100), (5, 6, -100), (7, 8, 9))


def make_sounds(name, task, dtype=torch.float32):
    """Return a batch: waves padded to the longest, or spectrograms."""
    numbers = torch.Generator().manual_seed(2)
    if task == "audio-classification":
        values = torch.randn(4, 16, 8, generator=numbers, dtype=dtype)
        entry = "input_features" if name == "Whisper" else "input_values"
        return {entry: values, "labels": torch.arange(4) % 3}
    labels = torch.tensor(WORDS) if task == "ctc" else torch.arange(4) % 3
    if name == "Wav2Vec2Bert":  # frames of a spectrogram
        there = torch.arange(14)[None] < torch.tensor([14, 6, 12, 14])[:, None]
        values = torch.randn(*there.shape, 6, generator=numbers, dtype=dtype)
        return {
            "input_features": values * there[..., None],
            "attention_mask": there.long(),
            "labels": labels,
        }
    there = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    values = torch.randn(there.shape, generator=numbers, dtype=dtype)
    return {
        "input_values": values * there,
        "attention_mask": there.long(),
        "labels": labels,
    }
