"""Models of sound: the promises of `test_transformers`, and those of their own."""

import copy
import pickle

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters.comparing import check_names, differences, make
from tests.adapters.hf_audio import SOUNDS, STABLE, make_sounds
from tests.adapters.test_transformers import call_layers
from tests.support.ranks import Ranks

CLASSES = "sequence-classification"
LISTEN = "audio-classification"
WAVES = [name for name, (_, tasks) in SOUNDS.items() if CLASSES in tasks]
EXACT = [name for name in WAVES if name != "WavLM"]
TABLE = "wavlm.encoder.layers.0.attention.rel_attn_embed.weight"
FIRST = [("Wav2Vec2", CLASSES), ("AST", LISTEN), ("Whisper", LISTEN)]
MASKS = "ignore:Support for mismatched key_padding_mask"


def adapted_of(name, task, split=False, dtype=torch.float32, **changes):
    model = make(SOUNDS, name, task, dtype, **changes)
    return from_transformers(model, split_blocks=split)


@pytest.mark.parametrize(("name", "task"), FIRST)
@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_outputs_and_gradients_are_bitwise_the_models(name, task, split, stages):
    adapted, batch = adapted_of(name, task, split), make_sounds(name, task)
    assert differences(adapted, batch, False, stages) == {}
    assert differences(adapted, batch, True, stages) == {}


@pytest.mark.parametrize("name", EXACT)
def test_so_are_those_of_relatives(name):
    # Norms come behind attention and MLP, or before them.
    for changes in ({}, STABLE):
        for split in (False, True):
            adapted = adapted_of(name, CLASSES, split, **changes)
            assert differences(adapted, make_sounds(name, CLASSES), True, 2) == {}
            check_names(adapted)


@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
def test_adapters_of_languages_are_part_of_their_block(split):
    adapted = adapted_of("Wav2Vec2", CLASSES, split, adapter_attn_dim=4, **STABLE)
    assert differences(adapted, make_sounds("Wav2Vec2", CLASSES), True, 2) == {}


@pytest.mark.filterwarnings(MASKS)
@pytest.mark.parametrize("changes", [{}, STABLE], ids=["late", "early"])
@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
def test_the_gradient_of_wavlms_table_is_summed_in_another_order(split, changes):
    adapted = adapted_of("WavLM", CLASSES, split, **changes)
    batch = make_sounds("WavLM", CLASSES)
    for mode in (False, True):
        found = differences(adapted, batch, mode, 4)
        assert set(found) <= {TABLE} and found.get(TABLE, 0) < 1e-6
    check_names(adapted)
    exact = adapted_of("WavLM", CLASSES, split, torch.float64, **changes)
    batch = make_sounds("WavLM", CLASSES, torch.float64)
    assert max(differences(exact, batch, True, 3, 4).values()) < 1e-12


@pytest.mark.parametrize(("name", "task"), FIRST)
def test_of_micro_batches_they_are_the_models_up_to_rounding(name, task):
    adapted = adapted_of(name, task, dtype=torch.float64)
    batch = make_sounds(name, task, torch.float64)
    assert max(differences(adapted, batch, True, 3, 4).values()) < 1e-12


@pytest.mark.parametrize(("name", "task"), FIRST)
def test_states_go_both_ways_and_layers_share_nothing(name, task):
    for split in (False, True):
        check_names(adapted_of(name, task, split))


@pytest.mark.filterwarnings(MASKS)
@pytest.mark.parametrize("name", WAVES)
def test_a_batch_without_mask_is_valid_throughout(name):
    adapted, batch = adapted_of(name, CLASSES), make_sounds(name, CLASSES)
    del batch["attention_mask"]
    assert set(differences(adapted, batch, True, 2)) <= {TABLE}


@pytest.mark.parametrize("length", [90, 41, 24, 12, 11, 5, 1])
def test_frames_are_valid_as_the_model_counts_them(length):
    adapted = adapted_of("Wav2Vec2", CLASSES)
    mask = (torch.arange(90)[None] < torch.tensor([[90], [length]])).long()
    hidden, frames = adapted.sequential[0](torch.randn(2, 90), mask)
    base = adapted.model.wav2vec2
    expected = base._get_feature_vector_attention_mask(hidden.shape[1], mask)
    assert torch.equal(frames, expected)


@pytest.mark.filterwarnings(MASKS)
@pytest.mark.parametrize("name", WAVES)
def test_the_loss_of_ctc_is_the_models(name):
    adapted, batch = adapted_of(name, "ctc"), make_sounds(name, "ctc")
    assert set(differences(adapted, batch, True, 2)) <= {TABLE}
    logits, lengths = call_layers(adapted, *adapted.inputs(batch))
    assert lengths.tolist() == [14, 6, 12, 14] and logits.shape[:2] == (4, 14)
    exact = adapted_of(name, "ctc", dtype=torch.float64)
    batch = make_sounds(name, "ctc", torch.float64)
    # The loss is taken in fp32, as in transformers.
    assert max(differences(exact, batch, True, 3, 4).values()) < 1e-6


def test_labels_beyond_the_vocabulary_are_refused():
    adapted, batch = adapted_of("Wav2Vec2", "ctc"), make_sounds("Wav2Vec2", "ctc")
    outputs = call_layers(adapted, *adapted.inputs(batch))
    with pytest.raises(ValueError, match="labels: expected ids below 12 .*, got 12"):
        adapted.loss(outputs, torch.full((4, 2), 12))


@pytest.mark.filterwarnings(MASKS)
def test_layers_can_be_copied_and_pickled_where_pytorch_lets_them():
    batch = make_sounds("Whisper", LISTEN)
    adapted = adapted_of("Whisper", LISTEN, split=True)
    layers = pickle.loads(pickle.dumps(adapted.sequential))
    assert torch.equal(
        layers(*adapted.inputs(batch)), adapted.sequential(*adapted.inputs(batch))
    )
    batch, adapted = make_sounds("WavLM", CLASSES), adapted_of("WavLM", CLASSES)
    copied = copy.deepcopy(adapted)
    assert torch.equal(
        call_layers(copied, *adapted.inputs(batch)),
        call_layers(adapted, *adapted.inputs(batch)),
    )
    with pytest.raises(RuntimeError, match="parametrized modules is only supported"):
        pickle.dumps(adapted.sequential)


def test_a_frozen_feature_encoder_is_a_layer_that_does_not_train():
    model = make(SOUNDS, "Wav2Vec2", CLASSES)
    model.freeze_feature_encoder()
    first, *others = from_transformers(model).sequential
    assert not any(p.requires_grad for p in first.parameters())
    assert all(any(p.requires_grad for p in layer.parameters()) for layer in others)


# -- what cannot be ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "task", "changes", "message"),
    [
        (
            "Hubert",
            CLASSES,
            {"apply_spec_augment": True},
            r"config: expected apply_spec_augment=False, got True; load the model with",
        ),
        ("Wav2Vec2", CLASSES, {"layerdrop": 0.1}, r"layerdrop=0.0, got 0.1"),
        ("Whisper", LISTEN, {"encoder_layerdrop": 0.1}, r"layerdrop=0.0, got 0.1"),
        ("WavLM", CLASSES, {"use_weighted_layer_sum": True}, "layer_sum=False, got Tr"),
        ("Whisper", LISTEN, {"use_weighted_layer_sum": True}, "sum=False, got True"),
        ("Wav2Vec2", "ctc", {"add_adapter": True}, "expected add_adapter=False, got"),
        ("WavLM", "ctc", {"ctc_loss_reduction": "sum"}, "'mean', got 'sum'"),
    ],
)
def test_what_is_drawn_or_read_across_layers_is_refused(name, task, changes, message):
    with pytest.raises(ValueError, match=message):
        adapted_of(name, task, **changes)


def test_masks_that_are_never_drawn_are_not_refused():
    adapted_of("Wav2Vec2", CLASSES, apply_spec_augment=True, mask_time_prob=0.0)


def test_spectrograms_of_another_length_are_refused():
    adapted = adapted_of("Whisper", LISTEN)
    with pytest.raises(ValueError, match="input_features: expected 8 frames, got 6"):
        call_layers(adapted, torch.randn(4, 16, 6))


# -- with the engine --------------------------------------------------------------


class Sounds(torch.utils.data.Dataset):
    """Noise of different lengths, of which the first number tells the label."""

    def __init__(self, size):
        numbers = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(40, 90, (size,), generator=numbers).tolist()
        self.values = torch.randn(size, 90, generator=numbers).double()

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        values = self.values[index]
        return values[: self.lengths[index]], int(values[0] > 0)


def to_fixed_length(samples):
    """Pad to 90 samples, so that a wave is the same in every batch."""
    there = torch.zeros(len(samples), 90)
    values = there.double()
    for row, (wave, _) in enumerate(samples):
        values[row, : len(wave)] = wave
        there[row, : len(wave)] = 1
    labels = torch.tensor([label for _, label in samples])
    return {"input_values": values, "attention_mask": there.long(), "labels": labels}


def train(rank, stages, microbatches):
    """Train on waves while layers freeze; return evaluations, losses and hits."""
    adapted = adapted_of("WavLM", CLASSES, dtype=torch.float64)
    assert adapted.ragged is None
    adapted.model.freeze_feature_encoder()
    engine = pt.PipeTransformer(
        adapted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        freeze=pt.freeze.Schedule([0, 3, 3]),
        config=pt.Config(
            plan=pt.PlanConfig(
                num_stages=stages, num_microbatches=microbatches, replicas="all"
            ),
            eval_microbatch_rows=3,
            # Whether it pays is another question.
            cache=pt.CacheConfig(admission="always"),
        ),
    )
    train_set, found = Sounds(24), []
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(train_set, 8, collate_fn=to_fixed_length):
                engine.step(batch)
            dev = engine.evaluate(Sounds(7), name="dev", collate_fn=to_fixed_length)
            found.append(dev["loss"])
        epochs = engine.history.epochs
    return found, [e.train_loss for e in epochs], [e.cache_hits for e in epochs]


@pytest.mark.distributed
def test_the_engine_trains_on_waves_and_caches_them():
    ((dev, losses, hits),) = Ranks(train, 1, 1, 1).join()
    assert hits == [0, 24, 24] and losses[2] < losses[0]
    for found in Ranks(train, 2, 2, 2).join():
        assert found[0] == pytest.approx(dev, rel=1e-9)
        assert found[1] == pytest.approx(losses[: len(found[1])], rel=1e-9)
