"""Encoders of text: the promises of `test_transformers`, and those of their own."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters.hf_encoders import ENCODERS, FAMILIES, PADDING
from tests.adapters.hf_models import CASES, make_batch, make_model, transformers
from tests.adapters.test_transformers import gradients, outputs_of
from tests.support.ranks import Ranks

FIRST = "sequence-classification"
WITH_TABLES = ("MPNet", "Deberta", "DebertaV2")
IN_FP32 = ("OpenAIPrivacyFilter",)  # in part, whatever the dtype of the weights
ALIKE = ("Camembert", "Data2VecText", "Ernie", "XLMRoberta")  # BERT or RoBERTa
MIXING = ("ConvBert", "MobileBert")  # whose tokens see the padding beside them
OWN = [
    (name, next(iter(tasks)))
    for name, (_, tasks) in ENCODERS.items()
    if name not in (*FAMILIES, *ALIKE)
]
FURTHER = [  # than the first task of a family whose code is its own
    (name, task)
    for name, (_, tasks) in ENCODERS.items()
    for task in tasks
    if (name, task) not in CASES and (task != FIRST or name in ALIKE)
]


def lacking(name, task):
    """Skip what this version of transformers has not, or has broken."""
    there = hasattr(transformers, f"{name}Config")
    old = transformers.__version__ < "5.24"
    broken = task == "multiple-choice" and name in ("Camembert", "XLMRoberta")
    found = f"{transformers.__version__} has no {name} that does {task}"
    return pytest.mark.skipif(not there or (old and broken), reason=found)


def each(cases):
    """Parametrize a test by family and task."""
    return pytest.mark.parametrize(
        ("name", "task"), [pytest.param(*case, marks=lacking(*case)) for case in cases]
    )


FAMILY = each(OWN)
HALVES = pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])


def differences(adapted, task, mode, stages, microbatches=1, **settings):
    """Return what differs from the model, by name, as shares of the largest value."""
    dtype = next(adapted.model.parameters()).dtype
    model, batch = adapted.model, make_batch(task, dtype=dtype)
    model.train(mode)
    adapted.sequential.train(mode)
    model.zero_grad()
    expected = model(**batch)
    expected.loss.backward()
    wanted = copy.deepcopy(gradients(model))
    model.zero_grad()
    layers, n = adapted.sequential, len(adapted.sequential)
    cuts = [n * k // stages for k in range(stages + 1)]
    pipe = pt.Pipe.from_plan(
        layers, cuts=cuts, num_microbatches=microbatches, **settings
    )
    got = pipe(*adapted.inputs(batch))
    loss = adapted.loss(got, adapted.targets(batch))
    loss.backward()
    pipe.close()
    own = gradients(model)
    assert own.keys() == wanted.keys()
    # The engine wants a gradient of everything that trains.
    assert own.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    values = got if isinstance(got, tuple) else (got,)
    pairs = dict(enumerate(zip(values, outputs_of(expected, task), strict=True)))
    pairs |= {name: (own[name], wanted[name]) for name in wanted}
    pairs["loss"] = loss, expected.loss
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in wanted.values())
    found = {
        name: float(((a - b).abs().max() / b.abs().max().clamp(least)).detach())
        for name, (a, b) in pairs.items()
    }
    return {name: share for name, share in found.items() if share != 0.0}


def are_the_models(found):
    """Tell whether all is bitwise the same, as far as that is promised."""
    # Blocks of MPNet sum the gradients of their own biases: another order.
    rounded = found.pop("mpnet.encoder.relative_attention_bias.weight", 0.0)
    return not found and rounded < 1e-5


@FAMILY
@HALVES
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_outputs_and_gradients_are_bitwise_the_models(name, task, split, stages):
    adapted = from_transformers(make_model(name, task), split_blocks=split)
    assert are_the_models(differences(adapted, task, False, stages))
    assert are_the_models(differences(adapted, task, True, stages))


@each(FURTHER)
def test_further_tasks_are_bitwise_the_models_too(name, task):
    adapted = from_transformers(make_model(name, task))
    assert are_the_models(differences(adapted, task, True, 2))


@each([*OWN, ("Bert", "multiple-choice")])
def test_of_micro_batches_they_are_the_models_up_to_rounding(name, task):
    model = make_model(name, task, torch.float64)
    adapted = from_transformers(model, split_blocks=True)
    found = differences(adapted, task, True, 3, 4)
    assert max(found.values()) < (1e-5 if name in IN_FP32 else 1e-9)


@pytest.mark.parametrize("name", WITH_TABLES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_table_gets_the_gradients_of_all_micro_batches_and_stages(name, checkpoint):
    model = make_model(name, FIRST, torch.float64)
    adapted = from_transformers(model)
    found = differences(adapted, FIRST, True, 4, 4, checkpoint=checkpoint)
    assert max(found.values()) < 1e-9
    tables = [p for n, p in model.named_parameters() if "encoder.rel" in n]
    assert len(tables) == 1 and tables[0].grad.abs().max() > 1e-6


@each([(n, t) for n, t in FURTHER if t == "masked-lm"] + OWN)
@HALVES
def test_names_and_weights_are_the_models_and_no_layer_shares_any(name, task, split):
    model = make_model(name, task)
    adapted = from_transformers(model, split_blocks=split, untie=True)
    ours, theirs = adapted.sequential.state_dict(), model.state_dict()
    back, again = adapted.to_transformers(ours), adapted.from_transformers(theirs)
    assert list(back) == list(theirs) and set(again) == set(ours)
    assert all(back[n].data_ptr() == theirs[n].data_ptr() for n in theirs)
    assert all(again[n].data_ptr() == ours[n].data_ptr() for n in ours)
    seen = {}
    for index, layer in enumerate(adapted.sequential):
        for what in (*layer.modules(), *layer.parameters(), *layer.buffers()):
            assert seen.setdefault(id(what), index) == index, type(what).__name__
    assert set(map(id, adapted.sequential.parameters())) == set(
        map(id, model.parameters())
    )


@FAMILY
@HALVES
def test_layers_can_be_pickled_and_copied(name, task, split):
    adapted = from_transformers(make_model(name, task), split_blocks=split)
    inputs = adapted.inputs(make_batch(task))
    expected = through(adapted.sequential, inputs)[-1]
    for layers in (
        pickle.loads(pickle.dumps(adapted.sequential)),
        copy.deepcopy(adapted.sequential),
    ):
        assert torch.equal(through(layers, inputs)[-1], expected)


def through(layers, inputs):
    """Return what each layer hands on."""
    found, value = [], inputs
    with torch.no_grad():
        for layer in layers:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
            found.append(value)
    return found


# -- what the activation cache relies on -------------------------------------------


@each(
    [(n, t) for n, t in [("Bert", FIRST), *OWN] if n not in (*WITH_TABLES, *MIXING)]
    + [("ModernBert", "multiple-choice"), ("Esm", "masked-lm")]
)
def test_a_row_has_the_values_that_it_has_without_padding(name, task):
    adapted = from_transformers(make_model(name, task, torch.float64))
    batch = make_batch(task)
    inputs = adapted.inputs(batch)
    dim = adapted.ragged.dim
    together = through(adapted.sequential, inputs)[:-1]
    for row, length in enumerate(adapted.ragged.lengths(inputs).tolist()):
        alone = tuple(t[row : row + 1].narrow(dim, 0, length) for t in inputs)
        pairs = zip(through(adapted.sequential, alone)[:-1], together, strict=True)
        for (hidden, mask), (hiddens, masks) in pairs:
            valid = hiddens[row : row + 1].narrow(dim, 0, length)
            least = 1e-6 if name in IN_FP32 else 1e-12
            assert (hidden - valid).abs().max() < least
            assert torch.equal(mask, masks[row : row + 1].narrow(dim, 0, length))


@pytest.mark.parametrize("name", MIXING)
def test_tokens_that_see_padding_are_kept_with_it(name):
    assert from_transformers(make_model(name, FIRST)).ragged is None


@pytest.mark.parametrize("name", WITH_TABLES)
def test_a_table_is_one_for_all_lengths_and_has_no_rows(name):
    adapted = from_transformers(make_model(name, FIRST))
    inputs = adapted.inputs(make_batch(FIRST))
    assert adapted.ragged.fixed
    few = through(adapted.sequential, tuple(t[:1, :4] for t in inputs))
    many = through(adapted.sequential, inputs)
    for one, other in zip(few[:-1], many[:-1], strict=True):
        assert torch.equal(one[2], other[2]) and one[2].shape[1] in (2, 16)


def samples_of(task, size=24):
    """Return samples of different lengths, as a tokenizer gives them."""
    batch, found = make_batch(task, rows=size), []
    for row in range(size):
        mask = batch["attention_mask"][row].reshape(-1, 9)
        length = min(int(mask.any(0).sum()), 4 + row % 6)
        found.append(
            {
                name: value[row][..., :length] if value.shape[-1] == 9 else value[row]
                for name, value in batch.items()
            }
        )
    return found


def pad(samples, length):
    """Pad to a length, or to the longest sample, as data collators do."""
    length = length or max(sample["input_ids"].shape[-1] for sample in samples)
    values = {"input_ids": PADDING, "labels": -100}

    def column(name):
        rows = [sample[name] for sample in samples]
        if rows[0].dim() == 0:
            return torch.stack(rows)
        value = values.get(name, 0)
        return torch.stack(
            [nn.functional.pad(r, (0, length - r.shape[-1]), value=value) for r in rows]
        )

    return {name: column(name) for name in samples[0]}


def train(rank, num_stages, microbatches, name, task, length):
    """Train with layers that freeze; return evaluations, losses, hits and a weight."""
    adapted = from_transformers(make_model(name, task, torch.float64), untie=True)
    collate, found = functools.partial(pad, length=length), []
    engine = pt.PipeTransformer(
        adapted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        freeze=pt.freeze.Schedule([0, 2, 2]),
        config=pt.Config(
            plan=pt.PlanConfig(
                num_stages=num_stages, num_microbatches=microbatches, replicas="all"
            ),
            eval_microbatch_rows=3,
            # Whether it pays is another question.
            cache=pt.CacheConfig(admission="always"),
        ),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(samples_of(task), 8, collate_fn=collate):
                engine.step(batch)
            dev = engine.evaluate(samples_of(task, 7), name="dev", collate_fn=collate)
            found.append(dev["loss"])
        epochs = engine.history.epochs
        weights = adapted.model.parameters()
        weight = sum(float(parameter.detach().sum()) for parameter in weights)
    hits = [epoch.cache_hits for epoch in epochs]
    return found, [epoch.train_loss for epoch in epochs], hits, weight


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "task", "ranks", "num_stages", "length"),
    [
        ("ModernBert", FIRST, 2, 2, None),
        ("Bert", "multiple-choice", 2, 1, None),
        ("DebertaV2", "masked-lm", 2, 2, None),
        ("RoFormer", "masked-lm", 2, 2, None),
        ("ConvBert", "masked-lm", 2, 2, 9),
    ],
)
def test_the_engine_trains_them_and_finds_all_in_the_cache(
    name, task, ranks, num_stages, length
):
    near = functools.partial(pytest.approx, rel=1e-9)
    ((dev, losses, hits, weight),) = Ranks(train, 1, 1, 1, name, task, length).join()
    assert hits == [0, 0, 24] and losses[2] < losses[0]
    for found in Ranks(train, ranks, num_stages, 2, name, task, length).join():
        assert found[0] == near(dev)
        assert found[1] in ([], near(losses))  # a standby has no records
        assert found[2] in ([], hits)
        assert not found[1] or found[3] == near(weight)


# -- masked-lm, multiple-choice ------------------------------------------------------


@each([(n, t) for n, t in FURTHER if t == "masked-lm"])
def test_an_untied_head_trains_alone_and_is_exported(name, task, tmp_path):
    model = make_model(name, task)
    adapted = from_transformers(model, untie=True)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is not embeddings.weight
    assert are_the_models(differences(adapted, task, False, 2))
    with torch.no_grad():
        for parameter in adapted.sequential.parameters():
            parameter.add_(0.125)
        head.weight.mul_(2)
        batch = make_batch(task)
        expected = model(**batch).logits
        adapted.export(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert torch.equal(again(**batch).logits, expected)
        again.get_output_embeddings().weight.zero_()
        assert again.get_input_embeddings().weight.any()


def test_choices_are_rows_of_a_sample_in_what_travels():
    adapted = from_transformers(make_model("Roberta", "multiple-choice"))
    inputs = adapted.inputs(make_batch("multiple-choice"))
    for hidden, mask in through(adapted.sequential, inputs)[:-1]:
        assert hidden.shape == (4, 2, 9, 16) and mask.shape == (4, 2, 9)


def test_a_batch_without_choices_is_refused():
    adapted = from_transformers(make_model("Bert", "multiple-choice"))
    inputs = adapted.inputs(make_batch(FIRST))
    with pytest.raises(ValueError, match=r"expected .* \(rows, choices, .* got \(4, 9"):
        adapted.sequential[0](*inputs)


# -- of single families --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DebertaV2", {"conv_kernel_size": 3}),
        ("DebertaV2", {"relative_attention": False}),
        ("DebertaV2", {"share_att_key": False, "position_buckets": -1}),
        ("Deberta", {"relative_attention": False}),
        ("Deberta", {"talking_head": True}),
        ("Esm", {"position_embedding_type": "absolute"}),
        ("Esm", {"emb_layer_norm_before": True, "token_dropout": False}),
        ("ModernBert", {"classifier_pooling": "cls"}),
        ("EuroBert", {"classifier_pooling": "mean"}),
        ("EuroBert", {"classifier_pooling": "bos"}),
        ("MobileBert", {"trigram_input": False}),
        ("RoFormer", {"embedding_size": 16, "rotary_value": True}),
        ("Ultrabert", {"classifier_pooling": "mean"}),
    ],
)
@HALVES
def test_other_configs_are_bitwise_the_models_too(name, changes, split):
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"{transformers.__version__} has no {name}")
    adapted = from_transformers(make_model(name, FIRST, **changes), split_blocks=split)
    assert are_the_models(differences(adapted, FIRST, True, 2))


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, 1.0, -1.0, 2.0])),
        ({"num_labels": 3}, torch.eye(3)[[0, 1, 2, 0]]),
        ({"num_labels": 3}, torch.tensor([2, 1, 0, 1])),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.eye(3)[[0, 1, 2, 0]],
        ),
    ],
    ids=["regression", "shares of labels", "one label", "several labels"],
)
def test_the_loss_of_deberta_is_of_the_kind_that_the_labels_are(changes, labels):
    model = make_model("DebertaV2", FIRST, **changes)
    adapted = from_transformers(model)
    batch = {**make_batch(FIRST), "labels": labels}
    with torch.no_grad():
        outputs = through(adapted.sequential, adapted.inputs(batch))[-1]
        own = adapted.loss(outputs, adapted.targets(batch))
        assert torch.equal(own, model(**batch).loss)


# -- what cannot be ------------------------------------------------------------------


def test_albert_is_refused_as_its_blocks_share_weights():
    config = transformers.AlbertConfig(
        vocab_size=9, hidden_size=8, embedding_size=8, num_attention_heads=2
    )
    model = transformers.AlbertForSequenceClassification(config)
    with pytest.raises(
        ValueError, match="blocks with weights of their own, got albert"
    ):
        from_transformers(model)


def test_a_big_bird_with_sparse_attention_is_refused():
    model = make_model("BigBird", FIRST)
    model.base_model.set_attention_type("block_sparse")  # the config says otherwise
    with pytest.raises(ValueError, match="attention_type='original_full', got 'block"):
        from_transformers(model)
    model = make_model("BigBird", FIRST, attention_type="block_sparse")
    with pytest.raises(ValueError, match="attention_type='original_full', got 'block"):
        from_transformers(model)


@pytest.mark.parametrize("name", ["Deberta", "DebertaV2"])
def test_a_deberta_whose_head_reads_the_embeddings_is_refused(name):
    model = make_model(name, "masked-lm", legacy=False)
    with pytest.raises(ValueError, match=r"expected config.legacy=True .* got False"):
        from_transformers(model)


@pytest.mark.parametrize("kind", ["Deberta", "DebertaV2"])
@pytest.mark.parametrize(
    "changes", [{"relative_attention": False}, {"pos_att_type": []}]
)
def test_a_table_that_no_block_reads_is_held_and_does_not_train(kind, changes):
    adapted = from_transformers(make_model(kind, FIRST, **changes))
    assert are_the_models(differences(adapted, FIRST, True, 2))
    assert set(adapted.to_transformers(adapted.sequential.state_dict())) == set(
        adapted.model.state_dict()
    )


def test_choices_share_the_masks_that_a_stage_makes_of_their_padding():
    adapted = from_transformers(make_model("Bert", "multiple-choice"))
    inputs = adapted.inputs(make_batch("multiple-choice"))
    first, second, third = list(adapted.sequential)[:3]
    state = first(*inputs)
    later = third(*second(*state))
    assert later[1] is state[1]


@pytest.mark.parametrize(
    ("name", "changes", "keeps"),
    [
        ("RoFormer", {}, False),  # pools the last position, padding or not
        ("RoFormer", {"summary_type": "first"}, True),
        ("Electra", {}, True),
        ("Electra", {"summary_type": "last"}, False),
    ],
)
def test_choices_are_ragged_where_their_summary_reads_no_padding(name, changes, keeps):
    model = make_model(name, "multiple-choice", **changes)
    assert (from_transformers(model).ragged is not None) is keeps


@each([(n, t) for n, t in FURTHER if t == "masked-lm"])
def test_a_head_that_never_shared_its_weight_trains_and_so_does_what_was_exported(
    name, task, tmp_path
):
    """Such heads have a second bias, which transformers never uses."""
    model = make_model(name, task, tie_word_embeddings=False)
    adapted = from_transformers(model)
    assert are_the_models(differences(adapted, task, False, 2))
    adapted.export(tmp_path)
    again = from_transformers(type(model).from_pretrained(tmp_path))
    collate = functools.partial(pad, length=None)
    engine = pt.PipeTransformer(
        again,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        freeze=pt.freeze.Never(),
        config=pt.Config(plan=pt.PlanConfig(num_stages=1)),
    )
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(samples_of(task), 8, collate_fn=collate):
                engine.step(batch)
    assert engine.history.epochs[0].train_loss > 0
