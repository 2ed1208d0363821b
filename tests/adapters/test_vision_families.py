"""Models of images and videos: the promises of `test_transformers`, and their own."""

import pickle

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters.comparing import check_names, differences, make
from tests.adapters.hf_vision import IMAGES, make_pixels
from tests.adapters.test_transformers import call_layers, pipe_of
from tests.support.ranks import Ranks

ALIKE = ("ViTMSN", "IJepa", "Dinov2WithRegisters", "MetaClip2", "Siglip")
TOWERS = ("Dinov2", "Beit", "Data2VecVision", "CLIP", "VideoMAE")
PYRAMIDS = ("Swin", "Swinv2", "Segformer", "ConvNext", "ConvNextV2")
NORMED = ("ResNet", "RegNet")  # by batch
SHARED = {"use_shared_relative_position_bias": True}
TABLE = "beit.shared_position_bias.relative_position_bias_table"


def model_of(name, dtype=torch.float32, **changes):
    (task,) = IMAGES[name][1]
    return make(IMAGES, name, task, dtype, **changes)


def adapted_of(name, split=False, dtype=torch.float32, **changes):
    return from_transformers(model_of(name, dtype, **changes), split_blocks=split)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_outputs_and_gradients_are_bitwise_the_models(name, split, stages):
    adapted, batch = adapted_of(name, split), make_pixels(name)
    assert differences(adapted, batch, False, stages) == {}
    assert differences(adapted, batch, True, stages) == {}


@pytest.mark.parametrize("name", PYRAMIDS + NORMED)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_those_of_pyramids_are(name, stages):
    # Of batch norm, running statistics too.
    adapted, batch = adapted_of(name), make_pixels(name)
    assert differences(adapted, batch, False, stages) == {}
    assert differences(adapted, batch, True, stages) == {}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in ALIKE),
        ("Dinov2", {"use_swiglu_ffn": True}),
        ("Beit", {"use_mean_pooling": False, "use_absolute_position_embeddings": True}),
        ("Beit", {"layer_scale_init_value": 0.0, "use_relative_position_bias": False}),
        ("Data2VecVision", SHARED),
        ("VideoMAE", {"use_mean_pooling": False}),
    ],
)
def test_so_are_those_of_relatives(name, changes):
    for split in (False, True):
        adapted = adapted_of(name, split, **changes)
        assert differences(adapted, make_pixels(name), True, 2) == {}
        check_names(adapted)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Swin", {"window_size": 3, "patch_size": 1}),  # padded to whole windows
        ("Swin", {"use_absolute_embeddings": True}),
        ("Swinv2", {"window_size": 3, "patch_size": 1}),
        ("Segformer", {"reshape_last_stage": False}),
        ("ConvNext", {"layer_scale_init_value": 0.0}),
        ("ResNet", {"layer_type": "bottleneck"}),
        ("RegNet", {"layer_type": "x"}),
    ],
)
def test_so_are_those_of_other_pyramids(name, changes):
    adapted = adapted_of(name, **changes)
    assert differences(adapted, make_pixels(name), True, 2) == {}


@pytest.mark.parametrize("name", TOWERS + PYRAMIDS)
def test_of_micro_batches_they_are_the_models_up_to_rounding(name):
    adapted = adapted_of(name, dtype=torch.float64)
    batch = make_pixels(name, dtype=torch.float64)
    assert max(differences(adapted, batch, True, 3, 4).values()) < 1e-12


@pytest.mark.parametrize("name", TOWERS + PYRAMIDS + NORMED)
def test_states_go_both_ways_and_layers_share_nothing(name):
    check_names(adapted_of(name))
    if name in TOWERS:
        check_names(adapted_of(name, split=True))


@pytest.mark.parametrize("name", ["Beit", "Swin", "ConvNext"])
def test_layers_can_be_pickled(name):
    changes = SHARED if name == "Beit" else {}
    adapted = adapted_of(name, split=name == "Beit", **changes)
    inputs = adapted.inputs(make_pixels(name))
    layers = pickle.loads(pickle.dumps(adapted.sequential))
    again = pt.Pipe.from_plan(layers, cuts=[0, len(layers)], num_microbatches=1)
    assert torch.equal(again(*inputs), pipe_of(adapted, 1)(*inputs))


@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
def test_the_gradient_of_a_bias_that_blocks_share_is_summed_in_another_order(split):
    adapted = adapted_of("Beit", split, **SHARED)
    found = differences(adapted, make_pixels("Beit"), True, 2)
    assert set(found) == {TABLE} and found[TABLE] < 1e-6
    exact = adapted_of("Beit", split, dtype=torch.float64, **SHARED)
    batch = make_pixels("Beit", dtype=torch.float64)
    assert max(differences(exact, batch, True, 3, 4).values()) < 1e-12
    check_names(adapted)


@pytest.mark.parametrize("name", NORMED)
def test_batch_norm_is_by_micro_batch(name):
    adapted, batch = adapted_of(name, dtype=torch.float64), make_pixels(name)
    batch["pixel_values"] = batch["pixel_values"].double()
    model, (pixels,) = adapted.model, adapted.inputs(batch)
    exact = differences(adapted, batch, False, 3, 4)
    assert max(exact.values()) < 1e-12  # evaluation is by running statistics
    model.train()
    expected = [model(half).logits for half in pixels.chunk(2)]
    adapted.sequential.train()
    assert torch.equal(pipe_of(adapted, 2, 2)(pixels), torch.cat(expected))


@pytest.mark.parametrize("name", ["Swin", "ConvNext", "ResNet", "Segformer"])
def test_blocks_of_pyramids_are_not_split(name):
    whole, split = adapted_of(name), adapted_of(name, split=True)
    assert len(split.sequential) == len(whole.sequential)


@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
@pytest.mark.parametrize("name", ["Dinov2", "Beit", "Data2VecVision"])
def test_paths_are_dropped_as_in_the_model(name, split):
    drops = {"drop_path_rate": 0.5, "hidden_dropout_prob": 0.3}
    adapted, batch = adapted_of(name, split, **drops), make_pixels(name)
    adapted.model.train()
    adapted.sequential.train()
    torch.manual_seed(7)
    expected = adapted.model(**batch).logits
    torch.manual_seed(7)
    found = call_layers(adapted, *adapted.inputs(batch))
    assert torch.equal(found, expected)
    adapted.sequential.eval()
    assert not torch.equal(call_layers(adapted, *adapted.inputs(batch)), expected)


def test_positions_are_interpolated_where_the_model_does_it_unasked():
    adapted, batch = adapted_of("Dinov2"), make_pixels("Dinov2")
    batch["pixel_values"] = torch.randn(4, 3, 12, 8)
    assert differences(adapted, batch, True, 2) == {}
    adapted = adapted_of("Swin")  # of any grid: what travels tells it
    assert differences(adapted, batch, True, 2) == {}


@pytest.mark.parametrize("name", ["Beit", "Data2VecVision"])
def test_images_of_another_size_are_refused_where_the_bias_is_of_one(name):
    adapted = adapted_of(name)
    with pytest.raises(ValueError, match="images of 8 x 8 .*, got 12 x 8"):
        call_layers(adapted, torch.randn(4, 3, 12, 8))


@pytest.mark.parametrize("name", ["Dinov2", "Beit", "CLIP", "Siglip"])
def test_weights_that_the_task_never_uses_do_not_train(name):
    adapted, batch = adapted_of(name), make_pixels(name)
    call_layers(adapted, *adapted.inputs(batch)).sum().backward()
    rest = {n for n, p in adapted.model.named_parameters() if p.grad is None}
    assert rest
    assert rest == {
        n for n, p in adapted.model.named_parameters() if not p.requires_grad
    }


class Images(torch.utils.data.Dataset):
    """Noise, of which the first number tells the label."""

    def __init__(self, size):
        numbers = torch.Generator().manual_seed(3)
        self.pixels = torch.randn(size, 3, 8, 8, generator=numbers).double()

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        pixels = self.pixels[index]
        return {"pixel_values": pixels, "labels": int(pixels[0, 0, 0] > 0)}


def train(rank, stages, microbatches):
    """Train on images while layers freeze; return evaluations, losses and hits."""
    engine = pt.PipeTransformer(
        adapted_of("Beit", dtype=torch.float64, **SHARED),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        freeze=pt.freeze.Schedule([0, 2, 2]),
        config=pt.Config(
            plan=pt.PlanConfig(
                num_stages=stages, num_microbatches=microbatches, replicas="all"
            ),
            eval_microbatch_rows=3,
            # Whether it pays is another question.
            cache=pt.CacheConfig(admission="always"),
        ),
    )
    train_set, found = Images(24), []
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(train_set, 8):
                engine.step(batch)
            found.append(engine.evaluate(Images(7), name="dev")["loss"])
        epochs = engine.history.epochs
    return found, [e.train_loss for e in epochs], [e.cache_hits for e in epochs]


@pytest.mark.distributed
def test_the_engine_trains_and_caches_where_a_table_travels_along():
    ((dev, losses, hits),) = Ranks(train, 1, 1, 1).join()
    assert hits == [0, 0, 24] and losses[2] < losses[0]
    for found in Ranks(train, 2, 2, 2).join():
        assert found[0] == pytest.approx(dev, rel=1e-9)
        assert found[1] == pytest.approx(losses[: len(found[1])], rel=1e-9)


@pytest.mark.parametrize("name", ["CLIP", "ConvNext", "Swin"])
def test_untie_changes_nothing_where_no_head_is_tied(name):
    adapted = from_transformers(model_of(name), untie=True)
    assert differences(adapted, make_pixels(name), True, 2) == {}
