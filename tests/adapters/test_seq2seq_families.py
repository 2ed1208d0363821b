"""Models with an encoder and a decoder as layers: values, gradients, training."""

import copy
import functools
import pickle

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters.hf_models import make_model, transformers
from tests.adapters.hf_seq2seq import FAMILIES, TASK, Pairs, collate, make_pairs
from tests.adapters.test_data_collators import tokenizer
from tests.adapters.test_transformers import call_layers, gradients, pipe_of
from tests.support.ranks import Ranks

KINDS = ("Bart", "MBart", "Whisper", "T5")
"""One of each way in which models are cut; the others are made of the same parts."""

ALL = pytest.mark.parametrize("name", FAMILIES)
OF_EACH_KIND = pytest.mark.parametrize("name", KINDS)
SPLITS = pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])


def seq2seq(name, dtype=torch.float32, **changes):
    return make_model(name, TASK, dtype, **changes)


def cut(model, **options):
    return from_transformers(model, untie=True, **options)


def compare(adapted, name, stages, mode=True, microbatches=1, dtype=torch.float32):
    """Return the largest differences from the model by name, as shares."""
    model, batch = adapted.model, make_pairs(name, dtype)
    model.train(mode)
    adapted.sequential.train(mode)
    model.zero_grad()
    expected = model(**batch, use_cache=False)
    expected.loss.backward()
    wanted = copy.deepcopy(gradients(model))
    model.zero_grad()
    pipe = pipe_of(adapted, stages, microbatches)
    got = pipe(*adapted.inputs(batch))
    loss = adapted.loss(got, adapted.targets(batch))
    loss.backward()
    pipe.close()
    own = gradients(model)
    assert own.keys() == wanted.keys()
    # The engine wants a gradient of everything that trains.
    assert own.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    pairs = {name: (own[name], wanted[name]) for name in wanted}
    pairs |= {"outputs": (got, expected.logits), "loss": (loss, expected.loss)}
    return {
        name: float(((a - b).abs().max() / b.abs().max().clamp(1.0)).detach())
        for name, (a, b) in pairs.items()
    }


def all_equal(differences):
    """Tell whether values are bitwise the model's: biases of T5 up to rounding."""
    return all(
        value < 1e-6 if "relative_attention_bias" in name else value == 0.0
        for name, value in differences.items()
    )


# -- values and gradients ----------------------------------------------------------


@ALL
def test_every_weight_of_a_model_that_was_loaded_gets_its_gradient(name, tmp_path):
    """Tables of sines do not train where a model is made, but once it is loaded."""
    made = seq2seq(name)
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path)
    assert all_equal(compare(cut(loaded), name, 2))


@OF_EACH_KIND
@SPLITS
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_outputs_and_gradients_are_bitwise_the_models(name, split, stages):
    adapted = cut(seq2seq(name), split_blocks=split)
    assert all_equal(compare(adapted, name, stages, mode=False))
    assert all_equal(compare(adapted, name, stages, mode=True))


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(KINDS)))
def test_families_of_the_same_parts_are_bitwise_the_models(name):
    for split, stages in ((False, 3), (True, 2)):
        adapted = cut(seq2seq(name), split_blocks=split)
        assert all_equal(compare(adapted, name, stages))


@OF_EACH_KIND
def test_they_are_so_with_masks_that_are_added(name):
    model = seq2seq(name, attn_implementation="eager")
    assert all_equal(compare(cut(model), name, 2))


@ALL
def test_of_micro_batches_they_are_the_models_up_to_rounding(name):
    adapted = cut(seq2seq(name, torch.float64))
    found = compare(adapted, name, 3, microbatches=4, dtype=torch.float64)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_of_shared_biases_are_the_same_with_any_number_of_stages(
    microbatches,
):
    def biases(stages):
        adapted, batch = cut(seq2seq("T5")), make_pairs("T5")
        pipe = pipe_of(adapted, stages, microbatches)
        adapted.loss(pipe(*adapted.inputs(batch)), batch["labels"]).backward()
        pipe.close()
        found = gradients(adapted.model)
        return [grad for name, grad in found.items() if "relative" in name]

    expected = biases(1)
    assert len(expected) == 2 and all(grad.any() for grad in expected)
    for stages in (2, 4):
        assert all(map(torch.equal, biases(stages), expected))


@pytest.mark.parametrize("name", ["Bart", "Whisper", "T5"])
def test_no_row_depends_on_padding_at_any_boundary(name):
    adapted, dims = cut(seq2seq(name), split_blocks=True), {}
    short = adapted.inputs(make_pairs(name))
    long = adapted.inputs(make_pairs(name, more=3))
    lengths = {short[1].shape[1]: short[3].tolist()}
    if len(short) > 4:
        lengths[short[0].shape[1]] = short[4].sum(1).tolist()
    for layer in adapted.sequential:
        short = layer(*short)
        long = layer(*long)
        short, long = [x if isinstance(x, tuple) else (x,) for x in (short, long)]
        for a, b in zip(short, long, strict=True):
            for row in range(len(a)):
                end = lengths.get(a.shape[1], [a.shape[1]] * len(a))[row]
                near = torch.allclose(a[row, :end], b[row, :end], rtol=0, atol=1e-5)
                assert near, (type(layer), tuple(a.shape), dims)


# -- layers ------------------------------------------------------------------------


@ALL
@SPLITS
def test_layers_share_nothing_and_states_go_both_ways(name, split):
    model = seq2seq(name)
    adapted = cut(model, split_blocks=split)
    seen = {}
    for index, layer in enumerate(adapted.sequential):
        for what in (*layer.modules(), *layer.parameters(), *layer.buffers()):
            assert seen.setdefault(id(what), index) == index, type(what).__name__
    ours, theirs = adapted.sequential.state_dict(), model.state_dict()
    assert set(map(id, adapted.sequential.parameters())) == set(
        map(id, model.parameters())
    )
    back, again = adapted.to_transformers(ours), adapted.from_transformers(theirs)
    assert list(back) == list(theirs) and set(again) == set(ours)
    assert all(back[n].data_ptr() == theirs[n].data_ptr() for n in theirs)
    assert all(again[n].data_ptr() == ours[n].data_ptr() for n in ours)


def test_blocks_are_layers_and_a_bridge_is_between_encoder_and_decoder():
    # Embeddings, 3 blocks, bridge, 2 blocks, head.
    assert len(cut(seq2seq("Bart")).sequential) == 1 + 3 + 1 + 2 + 1
    assert len(cut(seq2seq("T5"), split_blocks=True).sequential) == 1 + 6 + 1 + 4 + 1


@OF_EACH_KIND
@SPLITS
def test_layers_can_be_pickled_and_copied(name, split):
    adapted, batch = cut(seq2seq(name), split_blocks=split), make_pairs(name)
    expected = call_layers(adapted, *adapted.inputs(batch))
    for made in (
        pickle.loads(pickle.dumps(adapted.sequential)),
        copy.deepcopy(adapted.sequential),
    ):
        other = copy.copy(adapted)
        other.sequential = made
        assert torch.equal(call_layers(other, *adapted.inputs(batch)), expected)
    loader = pickle.loads(pickle.dumps(adapted))  # as processes that load data get it
    pairs = zip(loader.inputs(batch), adapted.inputs(batch), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# -- batches -----------------------------------------------------------------------


@ALL
def test_decoder_inputs_are_made_of_labels_as_the_model_makes_them(name):
    model, batch = seq2seq(name), make_pairs(name)
    adapted = cut(model)
    made = adapted.inputs(batch)[1]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        labels = batch["labels"]
        theirs = model.prepare_decoder_input_ids_from_labels(labels=labels)
        assert torch.equal(made, theirs)
        batch["decoder_input_ids"] = theirs  # as DataCollatorForSeq2Seq does
    given = {**batch, "decoder_input_ids": made}
    assert adapted.inputs(given)[1] is made
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        assert torch.equal(call_layers(adapted, *adapted.inputs(given)), expected)


def test_a_data_collator_for_these_models_is_taken_as_it_is(tmp_path):
    model = seq2seq("Bart")
    collator = transformers.DataCollatorForSeq2Seq(
        tokenizer(tmp_path), model=model, pad_to_multiple_of=8
    )
    texts = [list(range(5, 5 + n)) for n in (3, 9, 6)]
    batch = collator(
        [{"input_ids": ids, "labels": ids[: k + 2]} for k, ids in enumerate(texts)]
    )
    assert batch["input_ids"].shape == (3, 16) and batch["labels"].shape == (3, 8)
    adapted = cut(model)
    with torch.no_grad():
        found = call_layers(adapted, *adapted.inputs(batch))
        expected = model(**batch, use_cache=False)
    assert torch.equal(found, expected.logits)
    assert torch.equal(adapted.loss(found, adapted.targets(batch)), expected.loss)


@pytest.mark.parametrize("name", ["Bart", "Whisper", "T5"])
def test_a_mask_of_the_decoder_is_heeded(name):
    model, batch = seq2seq(name), make_pairs(name)
    adapted, mask = cut(model), (batch["labels"] != -100).long()
    mask[1, 2] = 0
    given = {**batch, "decoder_attention_mask": mask}
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        found = call_layers(adapted, *adapted.inputs(given))
        assert torch.equal(found, expected)
        assert not torch.equal(found, call_layers(adapted, *adapted.inputs(batch)))


def test_entries_that_whisper_does_not_use_are_left_out():
    adapted, batch = cut(seq2seq("Whisper")), make_pairs("Whisper")
    given = {**batch, "attention_mask": torch.ones(4, 24)}
    assert len(adapted.inputs(given)) == len(adapted.inputs(batch)) == 4


def test_batches_without_target_or_with_something_else_are_refused():
    adapted, batch = cut(seq2seq("Bart")), make_pairs("Bart")
    del batch["labels"]
    with pytest.raises(ValueError, match=r"labels as a tensor, or decoder_input_ids"):
        adapted.inputs(batch)
    with pytest.raises(TypeError, match="a tensor as decoder_input_ids, got list"):
        adapted.inputs({**batch, "decoder_input_ids": [[1]]})
    ids = torch.ones(4, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="got .*decoder_inputs_embeds"):
        adapted.inputs({**batch, "decoder_input_ids": ids, "decoder_inputs_embeds": 1})
    adapted.model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="config.decoder_start_token_id: expected a"):
        adapted.inputs(make_pairs("Bart"))


# -- what cannot be ----------------------------------------------------------------


def test_blocks_left_out_at_random_are_refused():
    model = seq2seq("M2M100", encoder_layerdrop=0.05)
    with pytest.raises(ValueError, match="no LayerDrop, .* got 0.05 in the encoder"):
        from_transformers(model)


def test_masks_drawn_over_features_are_refused():
    model = seq2seq("Whisper", apply_spec_augment=True)
    with pytest.raises(ValueError, match="no SpecAugment"):
        from_transformers(model)


def test_other_tasks_of_these_families_are_refused():
    config = seq2seq("Bart").config
    with pytest.raises(ValueError, match="a bart for seq2seq-lm, got BartForSequenceC"):
        from_transformers(transformers.BartForSequenceClassification(config))


# -- tied weights and exports ------------------------------------------------------


def engine_of(adapted, counts, **settings):
    return pt.PipeTransformer(
        adapted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        freeze=pt.freeze.Schedule(counts),
        config=pt.Config(cache=pt.CacheConfig(admission="always"), **settings),
    )


def test_shared_embeddings_hold_everything_together_until_they_are_untied():
    with pytest.raises(ValueError, match=r"layers 0 and 7 share .* untie=True"):
        engine_of(from_transformers(seq2seq("Bart")), [0, 4])
    model = seq2seq("Bart")
    adapted = from_transformers(model, untie=True)
    engine_of(adapted, [0, 4])
    weights = [
        model.model.encoder.embed_tokens.weight,
        model.model.decoder.embed_tokens.weight,
        model.lm_head.weight,
    ]
    assert len(set(map(id, weights))) == 3
    assert model.get_input_embeddings().weight is weights[0]


def test_an_encoder_of_speech_freezes_while_the_decoder_shares_its_embeddings():
    adapted = from_transformers(seq2seq("Whisper", torch.float64))
    with engine_of(adapted, [4, 4]) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(Pairs("Whisper"), 12, collate_fn=collate):
                engine.step(batch)
    assert [epoch.cache_hits for epoch in engine.history.epochs] == [0, 24]


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_embeddings_of_another_size_can_be_untied(name):
    model = seq2seq(name)
    model.resize_token_embeddings(101, mean_resizing=False)
    assert all_equal(compare(cut(model), name, 3))


@ALL
@pytest.mark.parametrize("untie", [False, True], ids=["tied", "untied"])
def test_an_export_is_loaded_with_equal_outputs(name, untie, tmp_path):
    changes = {"tie_word_embeddings": False} if name == "T5" else {}  # as version 1.1
    model, batch = seq2seq(name, **changes), make_pairs(name)
    adapted = from_transformers(model, untie=untie)
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.sequential.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=drawn)
                parameter.add_(noise, alpha=0.05)
    adapted.export(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        assert torch.equal(again(**batch, use_cache=False).logits, expected)
    tokens = again.get_decoder().embed_tokens
    assert (again.get_output_embeddings().weight is tokens.weight) != untie
    # What was untied is so without asking again.
    layers = from_transformers(again)
    with torch.no_grad():
        assert torch.equal(call_layers(layers, *layers.inputs(batch)), expected)
    assert set(layers.to_transformers(layers.sequential.state_dict())) == set(
        model.state_dict()
    )


# -- training ----------------------------------------------------------------------


def in_plain_loops(name, counts, order, collate_fn, dtype=torch.float64):
    """Train the model itself on the same batches with the same layers frozen."""
    model = seq2seq(name, dtype)
    layers, samples = cut(model).sequential, Pairs(name)
    optimizer, order = torch.optim.SGD(model.parameters(), lr=0.1), iter(order)
    for count in counts:
        layers[:count].requires_grad_(False)
        for _ in range(len(samples) // 8):
            optimizer.zero_grad()
            batch = collate_fn([samples[k] for k in next(order)])
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "counts", "targets", "hits"),
    [
        ("Whisper", (0, 4, 4, 6, 6), 0, [0, 0, 24, 24, 24]),
        ("Bart", (0, 4, 4, 4), 9, [0, 0, 24, 24]),
        ("Bart", (0, 2, 2, 4, 6, 6), 0, [0, 0, 24, 24, 24, 24]),
        ("T5", (0, 2, 4, 4), 0, [0, 0, 24, 24]),
    ],
    ids=["speech", "targets of one length", "targets of any length", "shared biases"],
)
def test_a_frozen_encoder_trains_the_decoder_as_a_plain_loop_does(
    name, counts, targets, hits
):
    model, order = seq2seq(name, torch.float64), []
    fill = functools.partial(collate, targets=targets)
    with engine_of(cut(model), list(counts)) as engine:
        for _ in engine.epochs(len(counts)):
            for batch in engine.batches(Pairs(name), 8, collate_fn=fill):
                order.append(batch.ids.tolist())
                engine.step(batch)
        found = [epoch.cache_hits for epoch in engine.history.epochs]
    assert found == hits
    expected = in_plain_loops(name, counts, order, fill)
    for key, value in model.state_dict().items():
        assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), key


def test_predictions_are_the_models_own_logits_for_given_targets():
    model, samples = seq2seq("Bart", torch.float64), Pairs("Bart", 10)
    with engine_of(cut(model), [0]) as engine:
        engine.prepare(samples, 5, collate_fn=collate)
        found = engine.predict(samples, collate_fn=collate, postprocess=list)
    assert len(found) == 10
    model.eval()
    for k, logits in enumerate(found):
        end = samples.targets[k]
        with torch.no_grad():
            expected = model(**collate([samples[k]])).logits[0]
        assert torch.allclose(logits[:end], expected, rtol=0, atol=1e-12)


def train(rank, name, num_stages, microbatches):
    """Train with a frozen encoder; return losses, an evaluation and a weight."""
    model = seq2seq(name, torch.float64)
    adapted, dev = cut(model), []
    plan = pt.PlanConfig(
        num_stages=num_stages, num_microbatches=microbatches, replicas="all"
    )
    with engine_of(adapted, [0, 4, 4], plan=plan, eval_microbatch_rows=3) as engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(Pairs(name), 8, collate_fn=collate):
                engine.step(batch)
            found = engine.evaluate(Pairs(name, 7), name="dev", collate_fn=collate)
            dev.append(found["loss"])
        epochs = engine.history.epochs
        last = adapted.sequential[-1].state_dict().popitem()[1].sum().item()
    return dev, [e.train_loss for e in epochs], last if epochs else None


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "num_stages"), [("Whisper", 1), ("T5", 2)])
def test_two_processes_train_as_one(name, num_stages):
    dev, losses, last = train(0, name, 1, 1)
    assert losses[2] < losses[0]
    for found in Ranks(train, 2, name, num_stages, 2).join():
        assert found[0] == pytest.approx(dev, rel=1e-9)
        assert found[1] == pytest.approx(losses[: len(found[1])], rel=1e-9)
        assert found[2] is None or found[2] == pytest.approx(last, rel=1e-9)
