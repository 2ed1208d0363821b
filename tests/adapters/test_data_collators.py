"""Data collators of transformers as they are, in training and in evaluation."""

import functools
import pickle

import pytest
import torch
from torch.utils.data import default_collate

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from pipetransformer.data.division import Division
from tests.adapters.hf_models import WORDS, make_model, transformers
from tests.support.ranks import Ranks

SIZE = 12


def tokenizer(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{n}" for n in range(WORDS - len(words))]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    return transformers.BertTokenizer(str(vocabulary), pad_token="[PAD]")


def sentences():
    drawn = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 9, (SIZE,), generator=drawn).tolist()
    return [
        [int(i) for i in torch.randint(5, WORDS, (n,), generator=drawn)]
        for n in lengths
    ]


def samples_of(kind):
    if kind == "rows":
        return [{"input_ids": x[:3], "label": x[0] % 2} for x in sentences()]
    if kind == "padding":
        return [{"input_ids": x, "label": x[0] % 2} for x in sentences()]
    if kind == "tokens":
        return [{"input_ids": x, "labels": [i % 2 for i in x]} for x in sentences()]
    return [{"input_ids": x} for x in sentences()]


def collator_of(kind, folder):
    if kind == "rows":
        return transformers.default_data_collator
    if kind == "padding":
        return transformers.DataCollatorWithPadding(tokenizer(folder))
    if kind == "tokens":
        return transformers.DataCollatorForTokenClassification(tokenizer(folder))
    made = transformers.DataCollatorForLanguageModeling
    return made(tokenizer(folder), mlm=False)


MODELS = {
    "rows": ("Bert", "sequence-classification"),
    "padding": ("Bert", "sequence-classification"),
    "tokens": ("Electra", "token-classification"),
    "words": ("GPT2", "causal-lm"),
}


def train(rank, kind, folder, workers, pairs):
    """Return losses and an evaluation; `pairs`: of batches divided beforehand."""
    adapted = from_transformers(make_model(*MODELS[kind], torch.float64), untie=True)
    samples, collate = samples_of(kind), collator_of(kind, folder)
    if pairs:
        collate = functools.partial(divided, Division(adapted), collate)
    engine = pt.PipeTransformer(
        adapted,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        freeze=pt.freeze.Schedule([0, 1]),
        config=pt.Config(eval_microbatch_rows=3),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(
                samples, 4, collate_fn=collate, num_workers=workers
            ):
                engine.step(batch)
        found = engine.evaluate(samples, collate_fn=collate)
        return [epoch.train_loss for epoch in engine.history.epochs], found


def divided(division, collate, samples):
    return division.pair(collate(samples))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", MODELS)
def test_a_collator_gives_what_its_divided_batches_give(kind, tmp_path):
    near = functools.partial(pytest.approx, rel=1e-6 if kind == "words" else 1e-9)
    losses, found = train(0, kind, tmp_path, 0, True)
    assert train(0, kind, tmp_path, 2, False) == (near(losses), near(found))
    for mine, ours in Ranks(train, 2, kind, tmp_path, 0, False).join():
        assert mine == near(losses[: len(mine)])
        assert ours == near(found)


def predict_words(rank, folder):
    """Return the likeliest next words of each sentence."""
    adapted = from_transformers(make_model("GPT2", "causal-lm"), untie=True)
    engine = pt.PipeTransformer(
        adapted,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        freeze=pt.freeze.Never(),
        config=pt.Config(
            eval_microbatch_rows=3,
            plan=pt.PlanConfig(num_stages=1, replicas="all"),  # none stands by
        ),
    )
    collate = transformers.DataCollatorWithPadding(tokenizer(folder))  # no labels
    samples = samples_of("words")
    with engine:
        engine.prepare(samples, 4, collate_fn=collator_of("words", folder))
        with pytest.raises(ValueError, match="let postprocess return"):
            engine.predict(samples, collate_fn=collate)
        return engine.predict(
            samples,
            collate_fn=collate,
            postprocess=lambda logits: [row[:3] for row in logits.argmax(-1)],
            to="all",
        )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_of_ragged_text_need_no_targets(ranks, tmp_path):
    model = make_model("GPT2", "causal-lm").eval()
    with torch.no_grad():
        expected = [
            model(torch.tensor([x])).logits[0, :3].argmax(-1).tolist()
            for x in sentences()
        ]
    for found in Ranks(predict_words, ranks, tmp_path).join():
        assert [row.tolist() for row in found] == expected


def train_and_export(rank, folder, num_stages):
    """Train and export; return outputs for a fixed input, and whether it leads."""
    adapted = from_transformers(make_model("Bert", "sequence-classification"))
    engine = pt.PipeTransformer(
        adapted,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        freeze=pt.freeze.Schedule([0, 1]),
        config=pt.Config(plan=pt.PlanConfig(num_stages=num_stages)),
    )
    collate = collator_of("rows", folder)
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(samples_of("rows"), 4, collate_fn=collate):
                engine.step(batch)
        engine.export_transformers(folder / "out")
        leads = engine.is_main
    adapted.model.eval()
    with torch.no_grad():
        return adapted.model(input_ids=torch.tensor([[5, 9, 3]])).logits, leads


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "num_stages"), [(1, 1), (2, 1), (2, 2)])
def test_what_is_exported_loads_in_plain_transformers(ranks, num_stages, tmp_path):
    found = Ranks(train_and_export, ranks, tmp_path, num_stages).join()
    (trained,) = [logits for logits, leads in found if leads]
    made = transformers.BertForSequenceClassification
    loaded = made.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([[5, 9, 3]])).logits
    assert torch.equal(logits, trained)
    untrained = make_model("Bert", "sequence-classification").eval()
    with torch.no_grad():
        before = untrained(input_ids=torch.tensor([[5, 9, 3]])).logits
    assert not torch.allclose(logits, before)
    assert {f.name for f in (tmp_path / "out").iterdir()} >= {
        "config.json",
        "model.safetensors",
    }


def test_loader_processes_get_no_weights():
    adapted = from_transformers(make_model("Bert", "sequence-classification"))
    copied = pickle.loads(pickle.dumps(Division(adapted)))
    batch = default_collate([{"input_ids": 3, "labels": 1}] * 2)
    batch["input_ids"] = batch["input_ids"][:, None]
    assert [t.shape for t in copied.pair(batch)[0]] == [(2, 1)] * 3
    assert copied.parts.sequential is None


def test_a_collate_fn_may_divide_a_batch_and_leave_its_inputs_named():
    division = Division(
        from_transformers(make_model("Bert", "sequence-classification"))
    )
    ids, labels = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2)
    inputs, targets = division.pair(({"input_ids": ids}, labels))
    assert len(inputs) == 3 and inputs[0] is ids and targets is labels
    assert len(division.inputs(({"input_ids": ids}, None))) == 3
