"""Small models with an encoder and a decoder: configs, classes by task, batches."""

import pytest

from tests.adapters.hf_small import PADDING, WORDS

torch = pytest.importorskip("torch")

TASK = "seq2seq-lm"
MELS, FRAMES = 8, 24
SOURCES, TARGETS = (9, 4, 7, 9), (3, 8, 5, 6)
"""Lengths of the rows of a batch."""

_BART = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "init_std": 0.2,
}
_WHISPER = {
    **{name: value for name, value in _BART.items() if "max_pos" not in name},
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 32,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_GENERATION = {TASK: "ForConditionalGeneration"}
FAMILIES = {
    "Bart": (_BART, _GENERATION),
    "MBart": (_BART, _GENERATION),
    "Whisper": (_WHISPER, _GENERATION),
    "T5": (_T5, _GENERATION),
    "Blenderbot": (_BART, _GENERATION),
    "BlenderbotSmall": (_BART, _GENERATION),
    "M2M100": (_BART, _GENERATION),
    "Marian": (_BART, {TASK: "MTModel"}),
    "Pegasus": (_BART, _GENERATION),
    "PLBart": (_BART, _GENERATION),
    "MT5": (_T5, _GENERATION),
    "UMT5": (_T5, _GENERATION),
}


class Pairs(torch.utils.data.Dataset):
    """Samples of different lengths: texts or features, and texts as labels."""

    def __init__(self, name, size=24, sources=(3, 12), targets=(2, 9)):
        drawn = torch.Generator().manual_seed(5)
        self.name = name
        self.sources = torch.randint(*sources, (size,), generator=drawn).tolist()
        self.targets = torch.randint(*targets, (size,), generator=drawn).tolist()
        self.ids = torch.randint(3, WORDS, (size, sources[1]), generator=drawn)
        self.labels = torch.randint(3, WORDS, (size, targets[1]), generator=drawn)
        self.features = torch.randn(
            size, MELS, FRAMES, generator=drawn, dtype=torch.float64
        )

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, index):
        labels = {"labels": self.labels[index, : self.targets[index]]}
        if self.name == "Whisper":
            return {"input_features": self.features[index], **labels}
        return {"input_ids": self.ids[index, : self.sources[index]], **labels}


def collate(samples, targets=0, more=0):
    """Pad to the longest sample of the batch, as data collators do.

    Args:
        samples: Of `Pairs`.
        targets: Length of all targets; 0: that of the longest.
        more: Positions of padding besides.
    """

    def column(name, value, length=0):
        rows = [sample[name] for sample in samples]
        length = more + (length or max(map(len, rows)))
        padded = torch.full((len(rows), length), value)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        return padded

    labels = {"labels": column("labels", -100, targets)}
    if "input_features" in samples[0]:
        features = [sample["input_features"] for sample in samples]
        return {"input_features": torch.stack(features), **labels}
    ids = column("input_ids", PADDING)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    there = torch.arange(ids.shape[1])[None] < lengths[:, None]
    return {"input_ids": ids, "attention_mask": there.long(), **labels}


def make_pairs(name, dtype=torch.float32, more=0):
    """Return a batch, its rows of the lengths above."""
    samples = Pairs(name, len(SOURCES))
    samples.sources, samples.targets = SOURCES, TARGETS
    batch = collate([samples[k] for k in range(len(samples))], more=more)
    if "input_features" in batch:
        batch["input_features"] = batch["input_features"].to(dtype)
    return batch
