"""The engine trains adapters: what moves, what is reduced, what stays as it was."""

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from tests.adapters.hf_models import make_model, transformers
from tests.adapters.test_peft import BERT, CLASSES, LLAMA, TEXT, lora_of
from tests.adapters.test_transformers import KeyedSamples, pad
from tests.support.pretrained import model_folder
from tests.support.ranks import Ranks

peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.distributed

ROWS = 24
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def minilm(folder):
    """Return the pre-trained encoder with adapters in its last two blocks."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, num_labels=2, **NO_DROPOUT)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["query"], layers_to_transform=[4, 5]
    )
    return peft.get_peft_model(model, config)


def parts(model):
    """Return what trains and what does not, by name."""
    named = dict(model.named_parameters())
    trained = {n: p for n, p in named.items() if p.requires_grad}
    return trained, {n: p for n, p in named.items() if n not in trained}


def num_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def copied(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


def equal(found, expected):
    same = (torch.equal(found[n], expected[n]) for n in expected)
    return found.keys() == expected.keys() and all(same)


def count_reduced(engine, sizes):
    """Have each all-reduce of gradients tell its bytes."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = engine.model.process_group

    def hook(_, bucket):
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return default_hooks.allreduce_hook(group, bucket)

    engine.model.register_comm_hook(None, hook)


def train(rank, model, options):
    """Train adapters; return what came of it."""
    return trained_by_engine(rank, model, **options)


def trained_by_engine(
    rank,
    model,
    *,
    counts=(0,),
    stages=1,
    rows=ROWS // 2,
    other_base=False,
    task=CLASSES,
    to=None,
):
    if not isinstance(model, torch.nn.Module):
        model = minilm(model)
    trained, base = parts(model)
    if other_base and rank == 1:
        with torch.no_grad():
            next(iter(base.values())).add_(1.0)
    before, flags = (
        copied(base),
        {n: p.requires_grad for n, p in model.named_parameters()},
    )
    adapted, sizes, hooked = from_transformers(model), [], None
    engine = pt.PipeTransformer(
        adapted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        freeze=pt.freeze.Schedule(list(counts)),
        config=pt.Config(
            plan=pt.PlanConfig(num_stages=stages, num_microbatches=2, replicas="all")
        ),
    )
    with engine:
        for _ in engine.epochs(len(counts)):
            samples = KeyedSamples(ROWS, task)
            for batch in engine.batches(samples, rows, collate_fn=pad):
                if engine.plan.num_replicas > 1 and engine.model is not hooked:
                    hooked = engine.model
                    count_reduced(engine, sizes)
                engine.step(batch)
        if to is not None:
            engine.export_transformers(to / "adapters")
            engine.export_transformers(to / "merged", merge=True)
            if engine.is_main:
                engine.save(to / "run.ckpt")
        reason = engine.history.first_plan.reason if engine.is_main else ""
        epochs = engine.history.epochs
        moved = [t.moved_bytes for t in engine.history.transformations]
    after_trained, after = parts(model)
    logits = None
    if to is not None:
        with torch.no_grad():
            logits = model.eval()(**pad([samples[k] for k in range(4)])).logits
    return {
        "base kept": equal(copied(after), before),
        "base": copied(after),
        "flags kept": flags
        == {n: p.requires_grad for n, p in model.named_parameters()},
        "trained": copied(after_trained),
        "trained bytes": num_bytes(trained.values()),
        "base bytes": num_bytes(base.values()),
        "buffer bytes": num_bytes(model.buffers()),
        "reduced": sizes,
        "moved": moved,
        "frozen": [e.shape.num_frozen_layers for e in epochs],
        "losses": [e.train_loss for e in epochs],
        "reason": reason,
        "logits": logits,
    }


def head_bytes(found):
    return num_bytes(t for n, t in found["trained"].items() if "classifier" in n)


def bert(first=1):
    return lora_of(BERT, first=first, dtype=torch.float64)


def grow(model, units=4, **options):
    """Two processes: one pipeline, then two replicas of the head."""
    options = {"counts": (0, units), "stages": 2, **options}
    return Ranks(train, 2, model, options).join()


def check_moves(lead, joined):
    """What new replicas were given, and what the replicas then told each other."""
    assert lead["base kept"] and joined["base kept"]
    assert lead["flags kept"] and joined["flags kept"]
    assert equal(joined["trained"], lead["trained"])
    (moved,) = lead["moved"]
    # Weights and their momentum; buffers; settings of the optimizer as text.
    rest = moved - 2 * lead["trained bytes"] - lead["buffer bytes"]
    assert 0 < rest < 10_000
    # The head alone trains on, in two steps.
    assert sum(lead["reduced"]) == 2 * head_bytes(lead) > 0


def test_adapters_alone_move_and_are_reduced():
    lead, joined = grow(bert())
    check_moves(lead, joined)
    assert lead["frozen"] == [2, 4]  # embeddings and the block without adapter
    assert "nothing trains before layer 2" in lead["reason"]


def test_base_weights_that_a_new_replica_does_not_have_are_given_to_it():
    lead, joined = grow(bert(), other_base=True)
    assert lead["base kept"] and not joined["base kept"]
    assert equal(joined["base"], lead["base"])
    assert lead["moved"][0] > lead["base bytes"]


def check_exports(lead, folder, base):
    """Both exports give the logits of the model that was trained."""
    batch = pad([KeyedSamples(ROWS, CLASSES)[k] for k in range(4)])
    plain = type(base).from_pretrained(folder / "merged")
    again = peft.PeftModel.from_pretrained(base, folder / "adapters")
    for model in (plain, again):
        with torch.no_grad():
            logits = model.to(lead["logits"].dtype).eval()(**batch).logits
        torch.testing.assert_close(logits, lead["logits"], rtol=1e-5, atol=1e-5)


def test_a_pretrained_encoder_is_trained_by_its_adapters(tmp_path):
    folder = model_folder(tmp_path)
    lead, joined = grow(folder, units=7, to=tmp_path)
    check_moves(lead, joined)
    assert lead["frozen"] == [5, 7]
    assert lead["moved"][0] < lead["base bytes"] / 100
    kind = transformers.AutoModelForSequenceClassification
    check_exports(lead, tmp_path, kind.from_pretrained(folder, num_labels=2))


def in_a_plain_loop(model, task, steps, num_frozen):
    """Train with whole batches in a loop of one's own; frozen layers do not train."""
    layers = from_transformers(model).sequential
    layers[:num_frozen].requires_grad_(False)
    optimizer = torch.optim.SGD(parts(model)[0].values(), lr=0.05, momentum=0.9)
    batch, losses = pad([*map(KeyedSamples(ROWS, task).__getitem__, range(ROWS))]), []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copied(parts(model)[0])


@pytest.mark.parametrize(("case", "task"), [(BERT, CLASSES), (LLAMA, TEXT)])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (3, 3)])
def test_it_is_what_a_plain_loop_trains(case, task, ranks, stages):
    model = lora_of(case, first=1, dtype=torch.float64)
    options = {"counts": (0,) * 3, "stages": stages, "rows": ROWS, "task": task}
    lead = Ranks(train, ranks, model, options).join()[0]
    losses, weights = in_a_plain_loop(model, task, 3, 2)
    assert losses[2] < losses[0]
    # The loss of a language model is taken in fp32, as in transformers.
    near = {"rtol": 1e-5, "atol": 1e-7} if task == TEXT else {"rtol": 1e-9, "atol": 0}
    assert lead["losses"] == pytest.approx(losses, rel=near["rtol"])
    torch.testing.assert_close(lead["trained"], weights, **near)
    assert lead["base kept"] and lead["frozen"] == [2] * 3


def test_a_checkpoint_goes_on_with_new_adapters_of_the_same_shape(tmp_path):
    options = {"counts": (0, 0), "rows": ROWS, "to": tmp_path}
    done = trained_by_engine(0, bert(), **options)
    model = bert()
    with torch.no_grad():
        for parameter in parts(model)[0].values():
            parameter.zero_()
    flags = [p.requires_grad for p in model.parameters()]
    engine = pt.PipeTransformer(
        from_transformers(model),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        freeze=pt.freeze.Schedule([0, 0]),
    )
    with engine:
        engine.load(tmp_path / "run.ckpt")
        assert equal(copied(parts(model)[0]), done["trained"])
    assert [p.requires_grad for p in model.parameters()] == flags


def test_an_export_to_be_merged_needs_adapters(tmp_path):
    engine = pt.PipeTransformer(
        from_transformers(make_model("Bert", CLASSES)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        freeze=pt.freeze.Never(),
    )
    with engine, pytest.raises(ValueError, match="merge: expected False of a model"):
        engine.export_transformers(tmp_path / "never", merge=True)
    assert not (tmp_path / "never").exists()
