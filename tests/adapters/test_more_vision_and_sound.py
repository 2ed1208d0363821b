"""More models of images, videos and sound: what the first ones promise, and theirs."""

import copy
import pickle

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters import hf_audio, hf_vision
from tests.adapters.comparing import check_names, differences, make
from tests.adapters.hf_audio import make_sounds
from tests.adapters.hf_vision import make_pixels
from tests.adapters.test_transformers import call_layers, pipe_of
from tests.support.ranks import Ranks

NORMED = (  # by batch
    "EfficientNet",
    "MobileNetV1",
    "MobileNetV2",
    "MobileViT",
    "MobileViTV2",
    "Levit",
    "Cvt",
    "SwiftFormer",
    "HGNetV2",
    "TextNet",
)
EXACT = [name for name in hf_vision.MORE if name not in NORMED]
HALVED = ("Siglip2", "Vivit", "VJEPA2")
WHOLE = [name for name in hf_vision.MORE if name not in HALVED]
CLASSES = "sequence-classification"
BERT, CONFORMER = "Wav2Vec2Bert", "Wav2Vec2Conformer"


def adapted_of(name, split=False, dtype=torch.float32, **changes):
    (task,) = hf_vision.MORE[name][1]
    model = make(hf_vision.MORE, name, task, dtype, **changes)
    return from_transformers(model, split_blocks=split)


def listening(name, task=CLASSES, split=False, dtype=torch.float32, **changes):
    model = make(hf_audio.MORE, name, task, dtype, **changes)
    return from_transformers(model, split_blocks=split)


# -- images and videos ------------------------------------------------------------


@pytest.mark.parametrize("name", hf_vision.MORE)
@pytest.mark.parametrize("stages", [1, 3])
def test_outputs_and_gradients_are_bitwise_the_models(name, stages):
    # Of batch norm, running statistics too.
    adapted, batch = adapted_of(name), make_pixels(name)
    assert differences(adapted, batch, False, stages) == {}
    assert differences(adapted, batch, True, stages) == {}


@pytest.mark.parametrize("name", HALVED)
@pytest.mark.parametrize("stages", [1, 4])
def test_so_are_those_of_halves(name, stages):
    adapted, batch = adapted_of(name, split=True), make_pixels(name)
    assert differences(adapted, batch, False, stages) == {}
    assert differences(adapted, batch, True, stages) == {}
    check_names(adapted)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("EfficientNet", {"pooling_type": "max"}),
        ("MobileNetV2", {"tf_padding": False, "first_layer_is_expansion": False}),
        ("MobileViT", {"output_stride": 16}),
        ("MobileViTV2", {"output_stride": 8}),
        ("Levit", {"mlp_ratio": (2, 0, 2)}),
        ("Cvt", {"embed_dim": (16, 16), "cls_token": (True, True)}),
        ("SwiftFormer", {"use_layer_scale": False}),
        ("SwiftFormer", {"embed_dims": (8, 8, 16), "downsamples": (False, True, True)}),
        ("HGNetV2", {"use_learnable_affine_block": True}),
        ("PoolFormer", {"use_layer_scale": False}),
        ("Pvt", {"sequence_reduction_ratios": (4, 1), "qkv_bias": False}),
        ("PvtV2", {"linear_attention": True}),
        ("Bit", {"layer_type": "bottleneck"}),
        ("Bit", {"global_padding": "SAME", "embedding_dynamic_padding": True}),
        ("FocalNet", {"use_conv_embed": True, "use_layerscale": True}),
        ("FocalNet", {"use_post_layernorm": True, "normalize_modulator": True}),
        ("DonutSwin", {"patch_size": 1, "window_size": 3}),
        ("Siglip2", {"attn_implementation": "eager"}),
        ("Timesformer", {"attention_type": "joint_space_time"}),
        ("Vivit", {"attn_implementation": "eager"}),
        ("VJEPA2", {"attn_implementation": "eager", "tubelet_size": 4}),
    ],
)
def test_so_are_those_of_other_configurations(name, changes):
    adapted = adapted_of(name, **changes)
    assert differences(adapted, make_pixels(name), True, 2) == {}


@pytest.mark.parametrize("name", EXACT)
def test_of_micro_batches_they_are_the_models_up_to_rounding(name):
    adapted = adapted_of(name, dtype=torch.float64)
    batch = make_pixels(name, dtype=torch.float64)
    # SigLIP 2 resizes its positions in fp32.
    most = 1e-6 if name == "Siglip2" else 1e-12
    assert max(differences(adapted, batch, True, 3, 4).values(), default=0.0) < most


@pytest.mark.parametrize("name", NORMED)
def test_batch_norm_is_by_micro_batch(name):
    adapted = adapted_of(name, dtype=torch.float64)
    batch = make_pixels(name, dtype=torch.float64)
    model, (pixels,) = adapted.model.train(), adapted.inputs(batch)
    expected = [model(half).logits for half in pixels.chunk(2)]
    adapted.sequential.train()
    assert torch.equal(pipe_of(adapted, 2, 2)(pixels), torch.cat(expected))


@pytest.mark.parametrize("name", hf_vision.MORE)
def test_states_go_both_ways_and_layers_can_be_pickled(name):
    adapted = adapted_of(name)
    check_names(adapted)
    inputs = adapted.inputs(make_pixels(name))
    expected = call_layers(adapted, *inputs)
    copied = copy.deepcopy(adapted)
    assert torch.equal(call_layers(copied, *inputs), expected)
    copied.sequential = pickle.loads(pickle.dumps(adapted.sequential))
    assert torch.equal(call_layers(copied, *inputs), expected)


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_that_are_whole_layers_are_not_split(name):
    whole, split = adapted_of(name), adapted_of(name, split=True)
    assert len(split.sequential) == len(whole.sequential)


@pytest.mark.parametrize(
    ("name", "drops"),
    [
        ("EfficientNet", {"drop_connect_rate": 0.5, "dropout_rate": 0.3}),
        ("MobileNetV2", {"classifier_dropout_prob": 0.5}),
        ("MobileViT", {"hidden_dropout_prob": 0.3, "classifier_dropout_prob": 0.3}),
        ("Cvt", {"drop_path_rate": (0.0, 0.5), "drop_rate": (0.2, 0.2)}),
        ("SwiftFormer", {"drop_path_rate": 0.5, "drop_conv_encoder_rate": 0.2}),
        *((n, {"drop_path_rate": 0.5}) for n in ("PoolFormer", "Pvt", "PvtV2")),
        *((n, {"drop_path_rate": 0.5}) for n in ("Hiera", "Bit", "FocalNet")),
        ("DonutSwin", {"drop_path_rate": 0.5}),
        ("Timesformer", {"hidden_dropout_prob": 0.3}),
        ("Vivit", {"hidden_dropout_prob": 0.3}),
        ("VJEPA2", {"drop_path_rate": 0.5}),
    ],
)
def test_paths_are_dropped_as_in_the_model(name, drops):
    for split in (False, True) if name in HALVED else (False,):
        adapted, batch = adapted_of(name, split, **drops), make_pixels(name)
        adapted.model.train()
        adapted.sequential.train()
        torch.manual_seed(7)
        expected = adapted.model(**batch).logits
        torch.manual_seed(7)
        found = call_layers(adapted, *adapted.inputs(batch))
        assert torch.equal(found, expected)


def test_the_layers_of_levit_keep_no_bias_of_other_weights():
    adapted, batch = adapted_of("Levit"), make_pixels("Levit")
    inputs = adapted.inputs(batch)
    before = call_layers(adapted, *inputs)
    with torch.no_grad():
        for name, value in adapted.sequential.named_parameters():
            if name.endswith("attention_biases"):
                value.add_(1.0).mul_(torch.arange(value.shape[1]))
    after = call_layers(adapted, *inputs)
    assert not torch.equal(after, before)
    assert torch.equal(after, adapted.model(**batch).logits)


def test_patches_of_siglip_2_come_with_mask_and_shapes():
    adapted, batch = adapted_of("Siglip2"), make_pixels("Siglip2")
    del batch["spatial_shapes"]
    with pytest.raises(ValueError, match="expected pixel_values, .*spatial_shapes, as"):
        adapted.inputs(batch)


@pytest.mark.parametrize("name", ["Siglip2", "VJEPA2"])
def test_weights_that_the_task_never_uses_do_not_train(name):
    adapted, batch = adapted_of(name), make_pixels(name)
    call_layers(adapted, *adapted.inputs(batch)).sum().backward()
    pairs = list(adapted.model.named_parameters())
    rest = {n for n, p in pairs if p.grad is None}
    assert rest and rest == {n for n, p in pairs if not p.requires_grad}


# -- sound ------------------------------------------------------------------------


@pytest.mark.parametrize("task", [CLASSES, "ctc"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("SEW", {}),
        ("SEW", {"squeeze_factor": 3, "hidden_size": 8, "feat_extract_norm": "layer"}),
        (CONFORMER, {}),
        (CONFORMER, {"position_embeddings_type": "rotary"}),
        (CONFORMER, {"position_embeddings_type": None}),
        (BERT, {}),
        (BERT, {"position_embeddings_type": "relative"}),
        (BERT, {"position_embeddings_type": "rotary"}),
        (BERT, {"attn_implementation": "eager"}),
    ],
)
def test_sounds_give_bitwise_what_the_model_gives(name, changes, task):
    batch = make_sounds(name, task)
    for split in (False, True):
        adapted = listening(name, task, split, **changes)
        assert differences(adapted, batch, False, 4) == {}
        assert differences(adapted, batch, True, 2) == {}
        check_names(adapted)
    if task == "ctc":
        logits, lengths = call_layers(adapted, *adapted.inputs(batch))
        assert lengths.tolist() == [14, 6, 12, 14] and logits.shape[:2] == (4, 14)
    del batch["attention_mask"]
    assert differences(adapted, batch, True, 2) == {}


@pytest.mark.parametrize("name", ["SEW", BERT])
def test_of_micro_batches_sounds_give_it_up_to_rounding(name):
    batch = make_sounds(name, CLASSES, torch.float64)
    for split in (False, True):
        adapted = listening(name, split=split, dtype=torch.float64)
        assert max(differences(adapted, batch, True, 3, 4).values()) < 1e-12


def test_dropout_of_sounds_is_the_models():
    drops = {"hidden_dropout": 0.2, "conformer_conv_dropout": 0.2}
    drops |= {"feat_proj_dropout": 0.1, "attention_dropout": 0.1}
    for name in (BERT, CONFORMER):
        for split in (False, True):
            adapted, batch = (
                listening(name, split=split, **drops),
                make_sounds(name, CLASSES),
            )
            adapted.model.train()
            adapted.sequential.train()
            torch.manual_seed(7)
            expected = adapted.model(**batch).logits
            torch.manual_seed(7)
            found = call_layers(adapted, *adapted.inputs(batch))
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "task", "changes", "message"),
    [
        ("SEW", CLASSES, {"layerdrop": 0.1}, r"layerdrop=0.0, got 0.1"),
        (CONFORMER, CLASSES, {"apply_spec_augment": True}, r"augment=False, got True"),
        (BERT, CLASSES, {"use_weighted_layer_sum": True}, r"sum=False, got True"),
        (BERT, "ctc", {"add_adapter": True}, r"add_adapter=False, got True"),
        ("SEW", "ctc", {"ctc_loss_reduction": "sum"}, r"'mean', got 'sum'"),
        (BERT, "ctc", {"ctc_loss_reduction": "sum"}, r"'mean', got 'sum'"),
    ],
)
def test_what_is_drawn_or_read_across_layers_is_refused(name, task, changes, message):
    with pytest.raises(ValueError, match=message):
        listening(name, task, **changes)


@pytest.mark.parametrize("changes", [{"num_labels": 1}, {"problem_type": "regression"}])
def test_the_loss_of_sounds_is_the_models_whatever_the_config_says(changes):
    adapted = listening(BERT, **changes)
    batch = dict(make_sounds(BERT, CLASSES))
    batch["labels"] = torch.zeros_like(batch["labels"])
    expected = adapted.model(**batch)
    loss = adapted.loss(expected.logits, adapted.targets(batch))
    torch.testing.assert_close(loss, expected.loss)


def test_a_cvt_without_a_class_token_is_refused():
    with pytest.raises(ValueError, match="class token in the last stage, got cls_toke"):
        adapted_of("Cvt", cls_token=[False, False, False])


# -- with the engine --------------------------------------------------------------


class Drawn(torch.utils.data.Dataset):
    """Noise, of which the first number tells the label.

    Args:
        name: Of whom it is an input.
        size: How many samples.
    """

    def __init__(self, name, size):
        numbers = torch.Generator().manual_seed(3)
        self.name = name
        shape = {"Siglip2": (9, 12), BERT: (14, 6)}.get(name, (3, 16, 16))
        self.values = torch.randn(size, *shape, generator=numbers).double()
        self.lengths = torch.randint(6, 10, (size,), generator=numbers).tolist()

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        values, length = self.values[index], self.lengths[index]
        label = int(values.flatten()[0] > 0)
        if self.name == BERT:
            there = torch.ones(length, dtype=torch.long)
            found = {"input_features": values[:length], "attention_mask": there}
        elif self.name == "Siglip2":
            there = (torch.arange(9) < length).int()
            shapes = torch.tensor([1, length])
            found = {"pixel_attention_mask": there, "spatial_shapes": shapes}
            found["pixel_values"] = values
        else:
            found = {"pixel_values": values}
        return {**found, "labels": label}


def to_longest(samples):
    """Pad to the longest sample of the batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    found = {"labels": torch.tensor([sample.pop("labels") for sample in samples])}
    names = list(samples[0])
    return found | {n: pad([s[n] for s in samples], True) for n in names}


def train(rank, name, stages, microbatches):
    """Train while layers freeze; return evaluations, losses and hits."""
    hears = name == BERT
    engine = pt.PipeTransformer(
        (listening if hears else adapted_of)(name, dtype=torch.float64),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        # So far that the token of CvT travels along.
        freeze=pt.freeze.Schedule([0, 3, 4] if name == "Cvt" else [0, 2, 3]),
        config=pt.Config(
            plan=pt.PlanConfig(
                num_stages=stages, num_microbatches=microbatches, replicas="all"
            ),
            eval_microbatch_rows=3,
            # Whether it pays is another question.
            cache=pt.CacheConfig(admission="always"),
        ),
    )
    train_set, found = Drawn(name, 24), []
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(train_set, 8, collate_fn=to_longest):
                engine.step(batch)
            dev = engine.evaluate(Drawn(name, 7), name="dev", collate_fn=to_longest)
            found.append(dev["loss"])
        epochs = engine.history.epochs
    return found, [e.train_loss for e in epochs], [e.cache_hits for e in epochs]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["Cvt", "Siglip2", BERT])
def test_the_engine_trains_and_caches_what_travels_along(name):
    ((dev, losses, hits),) = Ranks(train, 1, name, 1, 1).join()
    assert hits == [0, 0, 24] and losses[2] < losses[0]
    close = 1e-6 if name == "Siglip2" else 1e-9
    for found in Ranks(train, 2, name, 2, 1 if name == "Cvt" else 2).join():
        # Batch norm is of a replica's rows, and a plan behind the freeze has two.
        epochs = 1 if name == "Cvt" else 3
        own = found[1][:epochs]  # of a rank that takes part
        assert found[0][:epochs] == pytest.approx(dev[:epochs], rel=close)
        assert own == pytest.approx(losses[: len(own)], rel=close)
