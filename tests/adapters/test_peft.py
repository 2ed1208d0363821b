"""Models of peft as layers: values, gradients, what trains, the way back to plain."""

import pickle

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from pipetransformer.adapters.peft_models import IN_LAYERS
from pipetransformer.autocache.prefix import prefix_content
from tests.adapters.hf_models import make_batch, make_model, transformers
from tests.adapters.test_transformers import gradients, pipe_of

peft = pytest.importorskip("peft", reason="needs peft")

CLASSES, TEXT = "sequence-classification", "causal-lm"
BERT = ("Bert", CLASSES, ["query", "value"], "SEQ_CLS")
LLAMA = ("Llama", TEXT, ["q_proj", "v_proj"], "CAUSAL_LM")
BOTH = pytest.mark.parametrize("case", [BERT, LLAMA], ids=["Bert", "Llama"])


def lora_of(case=BERT, *, first=0, config=None, **changes):
    """Return a model of peft whose adapters, in blocks from `first` on, change it."""
    name, task, targets, kind = case
    dtype = changes.pop("dtype", torch.float32)
    model = make_model(name, task, dtype, **changes)
    if config is None:
        config = peft.LoraConfig(
            task_type=kind,
            target_modules=targets,
            layers_to_transform=list(range(first, 3)),
            r=4,
            lora_alpha=8,
        )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = peft.get_peft_model(model, config)
        with torch.no_grad():  # new adapters change nothing: let them
            for parameter in found.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return found.eval()


def compare(adapted, model, task, mode, stages):
    """Return whether outputs, loss and gradients are bitwise those of the model."""
    batch = make_batch(task)
    model.train(mode)
    adapted.sequential.train(mode)
    model.zero_grad()
    expected = model(**batch)
    expected.loss.backward()
    wanted = {n: g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    pipe = pipe_of(adapted, stages)
    logits = pipe(*adapted.inputs(batch))
    loss = adapted.loss(logits, adapted.targets(batch))
    loss.backward()
    pipe.close()
    own = gradients(model)
    assert own.keys() == wanted.keys()
    assert own.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    pairs = [(logits, expected.logits), (loss, expected.loss)]
    pairs += [(own[n], wanted[n]) for n in wanted]
    return all(torch.equal(a, b) for a, b in pairs)


@BOTH
@pytest.mark.parametrize("split", [False, True], ids=["blocks", "halves"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_outputs_and_gradients_are_bitwise_the_models(case, split, stages):
    model = lora_of(case)
    adapted = from_transformers(model, split_blocks=split)
    assert compare(adapted, model, case[1], False, stages)
    assert compare(adapted, model, case[1], True, stages)


METHODS = {
    "LORA": lambda: peft.LoraConfig(
        target_modules=["query"], use_dora=True, modules_to_save=["classifier"]
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["query", "output.dense"], feedforward_modules=["output.dense"]
    ),
    "LOHA": lambda: peft.LoHaConfig(target_modules=["query"]),
    "LOKR": lambda: peft.LoKrConfig(target_modules=["query"]),
    "OFT": lambda: peft.OFTConfig(target_modules=["query"], oft_block_size=4),
    "HRA": lambda: peft.HRAConfig(target_modules=["query"]),
    "MISS": lambda: peft.MissConfig(target_modules=["query"], r=4),
    "FOURIERFT": lambda: peft.FourierFTConfig(target_modules=["query"], n_frequency=9),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["LayerNorm"]),
}


@pytest.mark.parametrize("method", IN_LAYERS)
def test_every_method_that_is_accepted_gives_the_models_values(method, tmp_path):
    model = lora_of(config=METHODS[method]())
    adapted = from_transformers(model)
    assert compare(adapted, model, CLASSES, True, 3)
    adapted.export(tmp_path, merge=True)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    close(plain, model.eval(), CLASSES)


def test_a_head_that_is_saved_beside_the_adapters_trains():
    model = lora_of()  # for its task peft trains a copy of the classifier
    adapted = from_transformers(model)
    head = adapted.sequential[-1]
    trained = [n for n, p in head.named_parameters() if p.requires_grad]
    assert trained and all("modules_to_save" in n for n in trained)
    assert compare(adapted, model, CLASSES, True, 2)


REFUSED = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(
        task_type="SEQ_CLS", num_virtual_tokens=2
    ),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(
        task_type="SEQ_CLS", num_virtual_tokens=2
    ),
    "ADALORA": lambda: peft.AdaLoraConfig(target_modules=["query"], total_step=9),
    "LORA with alora_invocation_tokens": lambda: peft.LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_changes_more_than_layers_is_refused(method):
    config = REFUSED[method]()
    case = LLAMA if config.task_type == "CAUSAL_LM" else BERT
    model = peft.get_peft_model(make_model(*case[:2]), config)
    with pytest.raises(
        ValueError,
        match=rf"model: expected a PEFT method that lives in layers \(LORA, IA3, .*\), "
        rf"got {method} for the adapter 'default'",
    ):
        from_transformers(model)


def close(plain, model, task):
    batch = make_batch(task)
    plain.eval()
    with torch.no_grad():
        assert not isinstance(plain, peft.PeftModel)
        torch.testing.assert_close(
            plain(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5
        )


@BOTH
def test_a_merged_export_loads_as_a_plain_model_and_changes_nothing(case, tmp_path):
    model = lora_of(case)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    adapted = from_transformers(model)
    settings = prefix_content(adapted.sequential)
    adapted.export(tmp_path, merge=True)
    assert prefix_content(adapted.sequential) == settings
    assert not list(tmp_path.glob("adapter*"))
    kind = type(model.get_base_model())
    plain = kind.from_pretrained(tmp_path)
    assert not any("lora" in name for name in plain.state_dict())
    close(plain, model, case[1])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


@BOTH
def test_an_export_holds_the_adapters_alone(case, tmp_path):
    model = lora_of(case)
    adapted = from_transformers(model)
    settings = prefix_content(adapted.sequential)
    adapted.export(tmp_path)
    assert prefix_content(adapted.sequential) == settings
    assert not list(tmp_path.glob("model*"))
    again = peft.PeftModel.from_pretrained(make_model(case[0], case[1]), tmp_path)
    batch = make_batch(case[1])
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, model(**batch).logits)


def test_nothing_to_merge_is_said():
    adapted = from_transformers(make_model("Bert", CLASSES))
    with pytest.raises(ValueError, match="merge: expected False of a model without"):
        adapted.export("never written", merge=True)


def test_an_untied_head_keeps_its_flag_and_its_adapter(tmp_path):
    config = peft.LoraConfig(target_modules=["c_attn", "lm_head"], r=4)
    model = lora_of(("GPT2", TEXT, None, None), config=config)
    adapted = from_transformers(model, untie=True)
    head = model.get_base_model().lm_head
    assert head.weight is not model.get_base_model().transformer.wte.weight
    assert not head.weight.requires_grad
    assert compare(adapted, model, TEXT, True, 2)


def test_loader_processes_are_sent_no_weights():
    adapted = from_transformers(lora_of())
    assert len(pickle.dumps(adapted)) < 20_000


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_starting_boundary_is_at_the_first_adapter(first):
    adapted = from_transformers(lora_of(LLAMA, first=first))
    found = pt.autofreeze.starting_units(adapted.sequential, adapted.units)
    assert found == 1 + first  # the embeddings have none


@pytest.mark.parametrize(
    "saved", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids="+".join
)
def test_untie_tells_what_adapters_have_wrapped(saved):
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saved)
    base = make_model("Llama", TEXT, tie_word_embeddings=True)
    model = peft.get_peft_model(base, config)
    adapted = from_transformers(model, untie=True)
    seen = {}
    for index, layer in enumerate(adapted.sequential):
        for parameter in layer.parameters():
            assert seen.setdefault(id(parameter), index) == index
    assert compare(adapted, model, TEXT, True, 2)


@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("shared", ["embed_tokens", "lm_head"])
def test_merging_reaches_no_other_module_through_a_shared_weight(
    shared, untie, tmp_path
):
    config = peft.LoraConfig(target_modules=["q_proj", shared], r=4)
    case = ("Llama", TEXT, None, None)
    model = lora_of(case, config=config, tie_word_embeddings=True)
    base = model.get_base_model()
    adapted = from_transformers(model, untie=untie)
    adapted.export(tmp_path, merge=True)
    assert base.config.tie_word_embeddings != untie, "the model stays as it is"
    close(type(base).from_pretrained(tmp_path), model, TEXT)


def test_tokens_that_are_trained_in_a_shared_weight_cannot_be_untied():
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    case = ("Llama", TEXT, None, None)
    model = lora_of(case, config=config, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="untie: expected False with trainable_token"):
        from_transformers(model, untie=True)
