"""What users get wrong at first, and the error that says what to do instead."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters.hf_models import SMALL_BERT, make_batch, make_model, transformers
from tests.adapters.test_data_collators import sentences, tokenizer


@pytest.fixture
def pad(tmp_path):
    return transformers.DataCollatorWithPadding(tokenizer(tmp_path))


def rows(**more):
    return [{"input_ids": x, "labels": x[0] % 2, **more} for x in sentences()]


def bert(task="sequence-classification"):
    return make_model("Bert", task)


def engine_of(model=None, **settings):
    options = {
        "optimizer": lambda params: torch.optim.AdamW(params),
        "freeze": pt.freeze.Never(),
    }
    return pt.PipeTransformer(
        model if model is not None else from_transformers(bert()),
        **{**options, **settings},
    )


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda mask: mask[:, None, None, :], r"\(4, 1, 1, \d+\)"),
        (lambda mask: mask[:, 0], r"\(4,\)"),
    ],
)
def test_a_mask_that_is_not_one_of_tokens_is_refused(change, shape):
    batch = make_batch("sequence-classification")

    def collate(samples):
        return {**batch, "attention_mask": change(batch["attention_mask"])}

    text = r"expected an attention_mask of a number .* \(4, \d+\) tokens, got shape "
    with pytest.raises(ValueError, match=text + shape):
        train(engine_of(), rows()[:4], collate)


def train(engine, data, collate=None, then=None):
    """Train one pass, then call `then` with the engine."""
    with engine:
        for _ in engine.epochs(1):
            loaded = (data,) if isinstance(data, DataLoader) else (data, 4)
            for batch in engine.batches(*loaded, collate_fn=collate):
                engine.step(batch)
            if then is not None:
                then(engine)


def test_a_model_of_an_unsupported_family():
    config = transformers.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=1)
    model = transformers.XLNetForSequenceClassification(config)
    with pytest.raises(ValueError, match=r"got xlnet; for another .*own-model.md"):
        from_transformers(model)


def test_a_task_that_is_not_the_models():
    with pytest.raises(
        ValueError, match="task: expected sequence-class.* of a BertFor"
    ):
        from_transformers(bert(), task="question-answering")


def test_a_model_without_a_head():
    with pytest.raises(ValueError, match="a bert for sequence-.*, got BertModel"):
        from_transformers(bert().bert)


def test_the_model_itself_in_place_of_its_layers():
    with pytest.raises(
        TypeError, match="got BertFor.*; pipetransformer.adapters.from_tr"
    ):
        engine_of(bert())


def test_a_sequential_without_a_loss():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(TypeError, match="loss: expected a callable .*, got None"):
        engine_of(model)


def test_an_optimizer_that_is_built_already():
    with pytest.raises(TypeError, match="expected a factory, got a built optimizer"):
        engine_of(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_a_head_tied_to_the_embeddings_under_a_policy_that_freezes():
    model = make_model("GPT2", "causal-lm")
    found = (
        r"expected pt.freeze.Never\(\) where layers 0 and \d+ share the .*untie=True"
    )
    with pytest.raises(ValueError, match=found):
        engine_of(
            from_transformers(model),
            freeze=pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False),
        )
    untied = from_transformers(model, untie=True)
    engine_of(untied, freeze=pt.freeze.AlphaCap(alpha=1 / 3, gradient_term=False))


def test_batches_without_labels(pad):
    data = [{"input_ids": x} for x in sentences()]
    with pytest.raises(ValueError, match="batch: expected labels for sequence-class"):
        train(engine_of(), data, pad)


def test_an_evaluation_without_labels(pad):
    data = [{"input_ids": x} for x in sentences()]
    with pytest.raises(ValueError, match="batch: expected labels for sequence-class"):
        train(engine_of(), rows(), pad, lambda e: e.evaluate(data, collate_fn=pad))


def test_sentences_of_different_lengths_without_padding():
    data = [{**row, "input_ids": torch.tensor(row["input_ids"])} for row in rows()]
    for samples in (data, rows()):
        with pytest.raises(ValueError, match="samples: .* a data collator that pads"):
            train(engine_of(), samples)


def test_columns_of_text_that_were_left_in():
    data = [{**row, "input_ids": row["input_ids"][:3]} for row in rows(text="words")]
    with pytest.raises(ValueError, match="batch: expected input_ids.* got .*text"):
        train(engine_of(), data)


def test_a_dataset_that_streams(pad):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows())

    with pytest.raises(TypeError, match="expected a map-style dataset .*, got an iter"):
        train(engine_of(), Stream(), pad)


def test_a_loader_that_shuffles_by_itself(pad):
    loader = DataLoader(rows(), batch_size=4, shuffle=True, collate_fn=pad)
    with pytest.raises(ValueError, match=r"batch_sampler=engine.sampler\(dataset"):
        train(engine_of(), loader)


def test_a_metric_that_is_a_mean_already(pad):
    def accuracy(logits, labels):
        return (logits.argmax(-1) == labels).float().mean()

    with pytest.raises(ValueError, match="'accuracy': expected one value per row"):
        train(
            engine_of(),
            rows(),
            pad,
            lambda e: e.evaluate(rows(), {"accuracy": accuracy}, collate_fn=pad),
        )


def test_an_export_for_transformers_of_something_else(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    engine = engine_of(model, loss=nn.CrossEntropyLoss())
    with pytest.raises(
        ValueError, match="expected an engine of what from_transformers"
    ):
        train(
            engine,
            [(torch.zeros(3), 0)] * 8,
            then=lambda e: e.export_transformers(tmp_path),
        )


def with_checkpointing(**dropout):
    config = transformers.BertConfig(
        **{**SMALL_BERT, "hidden_dropout_prob": 0.0, **dropout}
    )
    model = transformers.BertForSequenceClassification(config)
    model.gradient_checkpointing_enable()
    return from_transformers(model)


@pytest.mark.parametrize(
    "where", ["hidden_dropout_prob", "attention_probs_dropout_prob"]
)
def test_dropout_in_layers_that_recompute_themselves(where):
    with pytest.raises(
        ValueError, match=r"no gradient_checkpointing with dropout.* PipeConfig\("
    ):
        engine_of(with_checkpointing(**{where: 0.1}))


def test_layers_that_recompute_themselves_may_have_no_dropout():
    engine_of(with_checkpointing())


def test_labels_as_a_list():
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": [0, 1]}
    model = make_model("Bert", "sequence-classification")
    with pytest.raises(TypeError, match="expected a tensor as labels, got list"):
        from_transformers(model).targets(batch)


def test_lists_where_tensors_are_meant(pad):
    same_length = [{"input_ids": [5, 6, 7], "labels": 1} for _ in range(8)]
    with pytest.raises(
        TypeError, match=r"expected a tensor as input_ids, got list; give a collate_fn"
    ):
        train(engine_of(), same_length)


class Pooling(transformers.BertModel):
    def forward(self, *args, **options):
        return super().forward(*args, **options)


class WeighingBertForSequenceClassification(transformers.BertForSequenceClassification):
    def forward(self, *args, **options):
        return super().forward(*args, **options)


def test_a_base_model_with_a_forward_of_its_own():
    model = bert()
    model.bert = Pooling(model.config)
    text = (
        "expected the forward of transformers, got Pooling with that of tests.adapters"
    )
    with pytest.raises(ValueError, match=text):
        from_transformers(model)


def weighing():
    return WeighingBertForSequenceClassification(bert().config)


def with_function():
    model = bert()
    model.loss_function = lambda logits, labels, config, **_: logits.sum()
    return model


@pytest.mark.parametrize("make", [weighing, with_function])
def test_a_model_whose_loss_is_its_own(make, pad):
    adapted = from_transformers(make())
    text = "loss: expected the loss that transformers takes, .* give the engine loss="
    with pytest.raises(ValueError, match=text):
        train(engine_of(adapted), rows(), pad)
    train(engine_of(from_transformers(make()), loss=nn.CrossEntropyLoss()), rows(), pad)


def test_an_export_to_a_file_is_refused_and_the_file_stays(tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(b"kept")
    with pytest.raises(NotADirectoryError, match="expected a folder's name, got a fil"):
        from_transformers(bert()).export(path)
    assert path.read_bytes() == b"kept"


def test_labels_of_rows_are_not_taken_for_those_of_tokens(caplog):
    adapted = from_transformers(bert())
    mask = torch.tensor([[1, 1, 0]])
    ids = torch.ones_like(mask)
    several = torch.tensor([[1.0, 0.0, 1.0]])  # as many as the row has tokens
    adapted.targets({"input_ids": ids, "attention_mask": mask, "labels": several})
    assert "padding" not in caplog.text
