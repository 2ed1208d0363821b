"""A model of transformers as layers: its values, its gradients, its names."""

import copy
import functools
import json
import pickle
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from pipetransformer.adapters.families import FAMILIES
from pipetransformer.autocache.prefix import prefix_content
from tests.adapters.hf_models import (
    CASES,
    make_batch,
    make_model,
    transformers,
)
from tests.support.ranks import Ranks

SPLITS = pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
ALL = pytest.mark.parametrize(
    ("name", "task"), CASES, ids=[f"{n}-{t}" for n, t in CASES]
)


def pipe_of(adapted, stages, microbatches=1):
    layers, n = adapted.sequential, len(adapted.sequential)
    cuts = [n * k // stages for k in range(stages + 1)]
    return pt.Pipe.from_plan(layers, cuts=cuts, num_microbatches=microbatches)


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def outputs_of(found, task):
    if task == "question-answering":
        return found.start_logits, found.end_logits
    return (found.logits,)


def compare(adapted, task, mode, stages, microbatches, dtype=torch.float32):
    """Return the largest differences of outputs, loss and gradients, as shares."""
    model, batch = adapted.model, make_batch(task, dtype=dtype)
    model.train(mode)
    adapted.sequential.train(mode)
    model.zero_grad()
    expected = model(**batch)
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
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == trains
    values = got if isinstance(got, tuple) else (got,)
    pairs = [*zip(values, outputs_of(expected, task), strict=True)]
    pairs += [(loss, expected.loss), *((own[n], wanted[n]) for n in wanted)]
    return [
        float(((a - b).abs().max() / b.abs().max().clamp(1.0)).detach())
        for a, b in pairs
    ]


@ALL
@SPLITS
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_outputs_and_gradients_are_bitwise_the_models(name, task, split, stages):
    adapted = from_transformers(make_model(name, task), split_blocks=split)
    assert set(compare(adapted, task, False, stages, 1)) == {0.0}
    assert set(compare(adapted, task, True, stages, 1)) == {0.0}


@ALL
def test_of_micro_batches_they_are_the_models_up_to_rounding(name, task):
    # Sums over rows come in another order; a micro-batch without padding takes
    # the attention's path without a mask.
    model = make_model(name, task, torch.float64)
    adapted = from_transformers(model)
    assert max(compare(adapted, task, True, 3, 4, torch.float64)) < 1e-12


@ALL
@SPLITS
def test_states_go_both_ways_under_each_others_names(name, task, split):
    model = make_model(name, task)
    adapted = from_transformers(model, split_blocks=split)
    ours, theirs = adapted.sequential.state_dict(), model.state_dict()
    back, again = adapted.to_transformers(ours), adapted.from_transformers(theirs)
    assert list(back) == list(theirs) and set(again) == set(ours)
    assert all(back[n].data_ptr() == theirs[n].data_ptr() for n in theirs)
    assert all(again[n].data_ptr() == ours[n].data_ptr() for n in ours)


@ALL
@SPLITS
def test_layers_hold_each_parameter_once_and_share_no_module(name, task, split):
    tied = name == "GPT2"
    model = make_model(name, task)
    adapted = from_transformers(model, split_blocks=split, untie=tied)
    seen = {}
    for index, layer in enumerate(adapted.sequential):
        for what in (*layer.modules(), *layer.parameters(), *layer.buffers()):
            assert seen.setdefault(id(what), index) == index, type(what).__name__
    assert set(map(id, adapted.sequential.parameters())) == set(
        map(id, model.parameters())
    )


def test_an_export_is_loaded_by_from_pretrained(tmp_path):
    model = make_model("Bert", "sequence-classification")
    adapted = from_transformers(model)
    with torch.no_grad():
        for parameter in adapted.sequential.parameters():
            parameter.add_(0.125)
    adapted.export(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(
        map(torch.equal, again.state_dict().values(), model.state_dict().values())
    )


@pytest.mark.parametrize(
    ("name", "task"), [("Bert", "sequence-classification"), ("GPT2", "causal-lm")]
)
def test_an_export_leaves_the_settings_that_layers_hold_as_they_are(
    name, task, tmp_path
):
    """The activation cache knows layers by these; one rank alone exports."""
    model = make_model(name, task)
    model.config.dtype, model.config.architectures = None, None
    before = prefix_content([model])
    adapted = from_transformers(model)
    adapted.export(tmp_path)
    assert prefix_content([model]) == before
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == [type(model).__name__]


def test_a_copy_holds_a_model_and_layers_of_its_own():
    adapted = from_transformers(make_model("Bert", "sequence-classification"))
    copied = copy.deepcopy(adapted)
    theirs = {id(p) for p in copied.model.parameters()}
    assert theirs == {id(p) for p in copied.sequential.parameters()}
    assert not theirs & {id(p) for p in adapted.model.parameters()}


@pytest.mark.parametrize("split", [False, True])
def test_layers_can_be_pickled_and_copied(split):
    task = "question-answering"
    adapted = from_transformers(make_model("DistilBert", task), split_blocks=split)
    inputs = adapted.inputs(make_batch(task))
    expected = pipe_of(adapted, 1)(*inputs)
    for layers in (
        pickle.loads(pickle.dumps(adapted.sequential)),
        copy.deepcopy(adapted.sequential),
    ):
        got = pt.Pipe.from_plan(layers, cuts=[0, len(layers)], num_microbatches=1)(
            *inputs
        )
        assert all(map(torch.equal, got, expected))


def test_a_tied_head_holds_the_boundary_until_it_is_untied(tmp_path):
    task = "causal-lm"
    engine_layers = from_transformers(make_model("GPT2", task)).sequential
    assert engine_layers[0].wte.weight is engine_layers[-1].model.lm_head.weight
    model = make_model("GPT2", task)
    adapted = from_transformers(model, untie=True)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert set(compare(adapted, task, False, 2, 1)) == {0.0}
    adapted.export(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        again.lm_head.weight.zero_()
    assert again.transformer.wte.weight.any()


def test_targets_of_cut_off_answers_give_no_loss():
    task = "question-answering"
    model, batch = make_model("Bert", task), make_batch(task)
    batch["start_positions"][1] = batch["end_positions"][1] = 40
    adapted = from_transformers(model)
    with torch.no_grad():
        outputs = pipe_of(adapted, 2)(*adapted.inputs(batch))
        assert torch.equal(
            adapted.loss(outputs, adapted.targets(batch)), model(**batch).loss
        )


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, 1.0, -1.0, 2.0])),
        ({"num_labels": 3}, torch.eye(3)[[0, 1, 2, 0]]),
        ({"num_labels": 3}, torch.tensor([2, 1, 0, 1])),
    ],
    ids=["regression", "several labels", "one label"],
)
def test_the_loss_of_a_row_is_of_the_kind_that_the_labels_are(changes, labels):
    task = "sequence-classification"
    model = make_model("Roberta", task, **changes)
    adapted = from_transformers(model)
    batch = {**make_batch(task), "labels": labels}
    with torch.no_grad():
        outputs = pipe_of(adapted, 1)(*adapted.inputs(batch))
        own = adapted.loss(outputs, adapted.targets(batch))
        assert torch.equal(own, model(**batch).loss)


def call_layers(adapted, *inputs):
    value = inputs
    for layer in adapted.sequential:
        value = layer(*value) if isinstance(value, tuple) else layer(value)
    return value


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_mask_of_the_batch_serves_several_models(name):
    ids, there = torch.arange(6).view(2, 3) + 5, torch.ones(2, 3, dtype=torch.bool)

    def logits_of(attention, mask):
        model = make_model(name, "causal-lm", attn_implementation=attention)
        return call_layers(from_transformers(model), ids, mask)

    expected = logits_of("eager", there.clone())
    logits_of("sdpa", there)
    assert torch.equal(logits_of("eager", there), expected)


def test_a_mask_of_the_batch_may_change_between_two_calls():
    task = "sequence-classification"
    adapted = from_transformers(make_model("Bert", task))
    inputs = adapted.inputs(make_batch(task))
    there = inputs[1].bool()
    call_layers(adapted, inputs[0], there, *inputs[2:])
    there[:, 1:] = False
    expected = call_layers(adapted, inputs[0], there.clone(), *inputs[2:])
    found = call_layers(adapted, inputs[0], there, *inputs[2:])
    assert torch.equal(found, expected)


def test_batches_without_mask_and_types_count_every_token():
    task = "sequence-classification"
    adapted = from_transformers(make_model("Bert", task))
    ids = make_batch(task)["input_ids"]
    got, mask, types = adapted.inputs({"input_ids": ids})
    assert got is ids and bool(mask.all()) and not bool(types.any())


class Samples(torch.utils.data.Dataset):
    """Sentences of different lengths, as a tokenizer gives them, with labels."""

    def __init__(self, size, task):
        drawn = torch.Generator().manual_seed(5)
        self.lengths = torch.randint(3, 12, (size,), generator=drawn).tolist()
        self.ids = torch.randint(3, 97, (size, 12), generator=drawn)
        self.task = task

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        ids = self.ids[index, : self.lengths[index]]
        if self.task == "question-answering":
            return {"input_ids": ids, "start_positions": ids[0] % 2, "end_positions": 2}
        labels = {
            "sequence-classification": ids[0] % 2,
            # Of every fourth sentence nothing counts.
            "token-classification": ids % 2
            if index % 4
            else torch.full_like(ids, -100),
            "causal-lm": ids,
        }
        return {"input_ids": ids, "labels": labels[self.task]}


class KeyedSamples(Samples):
    """The same: inputs are equal in all epochs, however they are padded."""

    def input_key(self, index, epoch):
        return index


def pad(samples):
    """Pad to the longest sample of the batch, as data collators do."""

    length = max(len(sample["input_ids"]) for sample in samples)
    if "start_positions" in samples[0]:
        length = 12  # the loss of answers is one over all positions, padding included

    def column(name, value):
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        if rows[0].dim() == 0:
            return torch.stack(rows)
        padded = torch.full((len(rows), length), value)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        return padded

    values = {"input_ids": 1, "labels": -100}
    batch = {name: column(name, values.get(name, 0)) for name in samples[0]}
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    there = torch.arange(length)[None] < lengths[:, None]
    return {**batch, "attention_mask": there.long()}


def train(rank, num_stages, microbatches, name, task, samples=Samples):
    """Train on ragged text; return evaluations, losses, samples and a weight."""
    model = make_model(name, task, torch.float64)
    adapted = from_transformers(model, untie=True)
    train_set, found = samples(24, task), []
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
            for batch in engine.batches(train_set, 8, collate_fn=pad):
                engine.step(batch)
            dev = engine.evaluate(Samples(7, task), name="dev", collate_fn=pad)
            found.append(dev["loss"])
        epochs = engine.history.epochs
        weight = adapted.sequential[-1].state_dict().popitem()[1].sum().item()
    losses = [e.train_loss for e in epochs]
    if epochs and task != "question-answering":  # else of one length: keys are told
        assert [e.cache_hits for e in epochs] == [0, 0, 24]
    return found, losses, [e.samples for e in epochs], weight if losses else None


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "task", "ranks", "num_stages", "microbatches", "samples"),
    [
        ("Bert", "sequence-classification", 2, 2, 4, Samples),
        ("Bert", "sequence-classification", 3, 3, 2, KeyedSamples),
        ("Roberta", "question-answering", 2, 1, 2, KeyedSamples),
        ("Electra", "token-classification", 4, 1, 1, KeyedSamples),
        ("GPT2", "causal-lm", 4, 2, 2, Samples),
        ("Llama", "causal-lm", 2, 1, 1, KeyedSamples),
    ],
)
def test_the_engine_trains_on_dict_batches_of_any_length(
    name, task, ranks, num_stages, microbatches, samples
):
    """Means are those of one process: over rows, and over tokens that count."""
    # The loss of a language model is taken in fp32, as in transformers.
    near = functools.partial(pytest.approx, rel=1e-6 if task == "causal-lm" else 1e-9)
    ((dev, losses, seen, weight),) = Ranks(train, 1, 1, 1, name, task).join()
    assert seen == [24] * 3 and losses[2] < losses[0]
    arguments = (num_stages, microbatches, name, task, samples)
    outcomes = Ranks(train, ranks, *arguments).join()
    assert any(found[1] for found in outcomes)
    for found in outcomes:
        assert found[0] == near(dev)
        assert found[2] in ([24] * 3, [])  # a standby has no records
        assert found[1] == near(losses[: len(found[1])])
        assert found[3] is None or found[3] == near(weight)


# -- what cannot be ---------------------------------------------------------------


def test_an_unsupported_model_is_refused_by_name():
    with pytest.raises(TypeError, match="expected one of transformers, .* got Linear"):
        from_transformers(nn.Linear(2, 2))
    config = transformers.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=1)
    model = transformers.XLNetForSequenceClassification(config)
    with pytest.raises(ValueError, match=r"docs/huggingface.md lists, got xlnet"):
        from_transformers(model)


def test_the_document_lists_every_family_by_its_model_type():
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    begin = page.index("## What is supported")
    table = page[begin : page.index("* Layers are", begin)]
    assert set(re.findall(r"`([a-z0-9_-]+)`", table)) == set(FAMILIES)


def test_an_older_transformers_is_refused(monkeypatch):
    model = make_model("Bert", "sequence-classification")
    monkeypatch.setattr(metadata, "version", lambda name: "5.4.1")
    with pytest.raises(ImportError, match="expected 5.10 or newer, got 5.4.1"):
        from_transformers(model)


def test_a_task_that_is_not_the_models_is_refused():
    model = make_model("Bert", "sequence-classification")
    with pytest.raises(ValueError, match="expected sequence-classification of a Bert"):
        from_transformers(model, task="question-answering")
    with pytest.raises(ValueError, match="task: expected one of"):
        from_transformers(model, task="poetry")
    with pytest.raises(
        ValueError, match="a bert for sequence-classification or.*own-model"
    ):
        from_transformers(model.bert)


def test_batches_that_lack_inputs_or_labels_are_refused():
    adapted = from_transformers(make_model("Bert", "sequence-classification"))
    batch = make_batch("sequence-classification")
    del batch["labels"]
    with pytest.raises(ValueError, match="expected labels for sequence-cl.* got atten"):
        adapted.targets(batch)
    with pytest.raises(ValueError, match="batch: expected input_ids, .* got labels"):
        adapted.inputs({"labels": torch.zeros(3)})
    with pytest.raises(ValueError, match="got .*inputs_embeds"):
        adapted.inputs({**batch, "inputs_embeds": torch.zeros(4, 9, 16)})
