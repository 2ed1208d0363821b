"""Decoders: the promises of `test_transformers`, and those of their own."""

import copy
import functools
import pickle

import pytest
import torch

import pipetransformer as pt
from pipetransformer.adapters import from_transformers
from pipetransformer.adapters.families.decoders import FAMILIES
from tests.adapters.hf_decoders import AUTO, DECODERS, make_decoder
from tests.adapters.hf_models import LENGTHS, PADDING, make_batch, transformers
from tests.adapters.test_transformers import (
    Samples,
    call_layers,
    compare,
    gradients,
    pad,
    pipe_of,
)
from tests.support.ranks import Ranks

TEXT, CLASSES = "causal-lm", "sequence-classification"
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
# Those that are cut as Llama is, name by name.
ALIKE = [
    *("arcee", "ernie4_5", "glm", "helium", "hunyuan_v1_dense", "nemotron", "olmo"),
    *("bitnet", "diffllama", "ernie4_5_moe", "glm4_moe_lite", "hunyuan_v1_moe"),
    *("jais2", "minimax_m2", "solar_open", "youtu"),
]
OWN = [kind for kind in DECODERS if kind not in ALIKE]
EXPERTS = [
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "mixtral"),
    *("olmoe", "qwen2_moe", "qwen3_moe"),
    *("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe_lite"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jetmoe", "lfm2_moe"),
    *("mellum", "mimo_v2_flash", "minimax_m2", "phimoe", "qwen3_5_moe_text"),
    *("gemma4_text", "jamba", "nemotron_h", "qwen3_next", "solar_open"),
]
# Those that compute a part in fp32, whatever the dtype of the weights.
IN_FP32 = [
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2"),
    *("gemma3_text", "glm4_moe", "gpt_neo", "gptj", "helium"),
    *("bamba", "diffllama", "dots1", "ernie4_5_moe", "exaone_moe", "falcon_mamba"),
    *("gemma4_text", "glm4_moe_lite", "granitemoehybrid", "jamba", "mamba", "mamba2"),
    *("mimo_v2_flash", "minimax_m2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next", "solar_open", "vaultgemma"),
]
# Those that before 5.24 mask no row that is alone, or whose loss was another one.
RECENT = [
    *("bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba", "mamba2"),
    *("modernbert-decoder", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    *("nemotron_h", "qwen3_next"),
]
SPLITS = {"blocks": False, "halves": True}


def each(kinds):
    there = [k for k in kinds if k in transformers.CONFIG_MAPPING]
    there = [k for k in there if not (OLD and k in RECENT)]
    return pytest.mark.parametrize("kind", there)


def tasks_of(kind):
    """Return for what there are models of a family, besides causal-lm."""
    if kind not in transformers.CONFIG_MAPPING:
        return []
    config = transformers.CONFIG_MAPPING[kind]
    mappings = {t: getattr(transformers, AUTO[t])._model_mapping for t in AUTO}
    return [t for t in AUTO if t != TEXT and config in mappings[t]]


FURTHER = [(kind, task) for kind in DECODERS for task in tasks_of(kind)]


def exact(adapted, task, stages, dtype=torch.float32):
    """Return whether outputs, loss and gradients are the model's, bit for bit."""
    found = [compare(adapted, task, mode, stages, 1, dtype) for mode in (False, True)]
    return {value for values in found for value in values} == {0.0}


def test_every_family_is_tested():
    assert set(DECODERS) == set(FAMILIES)


@each(OWN)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_outputs_and_gradients_are_bitwise_the_models(kind, split, stages):
    adapted = from_transformers(make_decoder(kind), split_blocks=split)
    assert exact(adapted, TEXT, stages)


@each(ALIKE)
def test_so_they_are_of_families_that_are_cut_as_llama_is(kind):
    assert exact(from_transformers(make_decoder(kind), split_blocks=True), TEXT, 2)


@pytest.mark.parametrize(
    ("kind", "task"), FURTHER, ids=[f"{k}-{t}" for k, t in FURTHER]
)
def test_so_they_are_of_classifiers_and_readers(kind, task):
    adapted = from_transformers(make_decoder(kind, task), split_blocks=True)
    assert exact(adapted, task, 2)


@each(DECODERS)
def test_so_they_are_with_eager_attention(kind):
    model = make_decoder(kind, attn_implementation="eager")
    assert exact(from_transformers(model), TEXT, 2)


@each(sorted({"bloom", "falcon", "gpt2", "llama", "olmo3", "mpt", *EXPERTS, *IN_FP32}))
def test_so_they_are_in_bf16(kind):
    model = make_decoder(kind, dtype=torch.bfloat16)
    assert exact(from_transformers(model, split_blocks=True), TEXT, 2, torch.bfloat16)


VARIANTS = {
    "BLOOM with residuals behind norms": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
    ),
    "Falcon with biases by distance": (
        "falcon",
        {"alibi": True, "parallel_attn": False, "multi_query": False},
    ),
    "Falcon of the second form": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 1},
    ),
    "GPT-NeoX with MLP behind attention": (
        "gpt_neox",
        {"use_parallel_residual": False},
    ),
    "Mistral without a window": ("mistral", {"sliding_window": None}),
    "OPT with norms behind, and projections": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 8},
    ),
    "Qwen3-MoE with dense blocks": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "Gemma 4 without experts": ("gemma4_text", {"enable_moe_block": False}),
    "Gemma 4 that sees images": (
        "gemma4_text",
        {"use_bidirectional_attention": "vision"},
    ),
    "Granite with a state space and one MLP": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "HyperCLOVA X without norms behind": ("hyperclovax", {"use_post_norm": False}),
    "OLMo Hybrid without positions": ("olmo_hybrid", {"rope_parameters": None}),
    "StableLM with MLP beside attention": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True},
    ),
}


@pytest.mark.parametrize(("kind", "changes"), VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_so_they_are_of_variants_of_a_family(kind, changes, attention):
    if kind == "bloom" and attention == "sdpa":
        pytest.skip("BLOOM has no sdpa")
    model = make_decoder(kind, attn_implementation=attention, **changes)
    assert exact(from_transformers(model, split_blocks=True), TEXT, 2)


@each(
    [
        *("bamba", "biogpt", "falcon_mamba", "gemma4_text", "granitemoehybrid"),
        *("jamba", "lfm2", "llama", "mamba", "mamba2", "mpt", "nemotron_h"),
        *("olmo_hybrid", "openai-gpt", "qwen3_5_text", "qwen3_next", "xglm"),
    ]
)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_outputs_are_bitwise_the_models_where_padding_is_in_front(kind, split):
    model, batch = make_decoder(kind), texts("left")
    del batch["labels"]
    adapted = from_transformers(model, split_blocks=split)
    there = batch["attention_mask"].bool()
    with torch.no_grad():
        found = call_layers(adapted, *adapted.inputs(batch))[there]
        assert torch.equal(found, model(**batch).logits[there])


ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 6},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 6,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 6,
    },
}


@pytest.mark.parametrize("rope", ROPE)
def test_so_they_are_with_scaled_rotary_embeddings(rope):
    """Batches of 9 tokens, then of 5, then of 9, where 6 are few enough to stay."""
    values = {"rope_type": rope, "rope_theta": 10000.0, **ROPE[rope]}
    model = make_decoder("llama", rope_parameters=values, max_position_embeddings=6)
    adapted = from_transformers(model, split_blocks=True)
    for length in (9, 5, 9):
        batch = {n: t[:, :length] for n, t in make_batch(TEXT).items()}
        with torch.no_grad():
            found = call_layers(adapted, *adapted.inputs(batch))
            assert torch.equal(found, model(**batch).logits)


@each(DECODERS)
def test_of_micro_batches_they_are_the_models_up_to_rounding(kind):
    changes = {"experts_implementation": "eager"} if kind in EXPERTS else {}
    if kind == "xglm":
        pytest.skip("its attention cannot mask in fp64")
    if kind in (
        "gemma2",
        "vaultgemma",
    ):  # its own mask of a row of padding is not a number in fp64
        changes["sliding_window"] = 16
    model = make_decoder(kind, dtype=torch.float64, **changes)
    found = compare(from_transformers(model), TEXT, True, 3, 4, torch.float64)
    least = 1e-6 if kind in IN_FP32 else 1e-12
    assert all(value < least for value in found)


@each(["bloom", "falcon", "gpt2", "gpt_neox", "gptj", "llama", "opt", "phi"])
def test_so_they_are_of_classifiers_and_readers_of_micro_batches(kind):
    """Their losses are in fp32, or not: that differs between families and tasks."""
    for task in tasks_of(kind):
        model = make_decoder(kind, task, dtype=torch.float64)
        found = compare(from_transformers(model), task, True, 3, 4, torch.float64)
        least = 1e-6 if kind in IN_FP32 else 1e-12
        assert all(value < least for value in found), task


@each(DECODERS)
def test_layers_of_an_untied_model_share_nothing_and_have_its_names(kind):
    model = make_decoder(kind, tie_word_embeddings=True)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied or kind == "nemotron_h", "nothing to untie"
    adapted = from_transformers(model, split_blocks=True, untie=True)
    seen = {}
    for index, layer in enumerate(adapted.sequential):
        for what in (*layer.modules(), *layer.parameters(), *layer.buffers()):
            assert seen.setdefault(id(what), index) == index, type(what).__name__
    theirs, ours = model.state_dict(), adapted.sequential.state_dict()
    back, again = adapted.to_transformers(ours), adapted.from_transformers(theirs)
    assert list(back) == list(theirs) and set(again) == set(ours)
    assert all(back[n].data_ptr() == theirs[n].data_ptr() for n in theirs)
    assert exact(adapted, TEXT, 2)


@each(DECODERS)
def test_what_travels_depends_on_the_tokens_of_a_row_alone(kind):
    changes = {}
    if kind in ("gemma4_text", "nemotron_h"):  # whose values are large
        changes = {"dtype": torch.float64, "experts_implementation": "eager"}
    adapted = from_transformers(make_decoder(kind, **changes), split_blocks=True)
    batch = {n: t for n, t in make_batch(TEXT).items() if n != "labels"}
    wider = {
        "input_ids": torch.cat([batch["input_ids"], torch.full((4, 5), PADDING)], 1),
        "attention_mask": torch.cat([batch["attention_mask"], torch.zeros(4, 5)], 1),
    }
    with torch.no_grad():
        here, there = adapted.inputs(batch), adapted.inputs(wider)
        for layer in adapted.sequential[:-1]:
            here, there = layer(*here), layer(*there)
            for row, length in enumerate(LENGTHS):
                torch.testing.assert_close(
                    here[0][row, :length], there[0][row, :length]
                )
            assert torch.equal(here[1], there[1][:, : here[1].shape[1]])


@each(
    [
        *("bloom", "falcon", "gemma3_text", "gemma4_text", "granitemoehybrid"),
        *("mamba", "mpt", "nanochat", "openai-gpt", "opt", "qwen3_next", "xglm"),
    ]
)
def test_layers_can_be_pickled_and_copied(kind):
    task = CLASSES if CLASSES in tasks_of(kind) else TEXT
    adapted = from_transformers(make_decoder(kind, task), split_blocks=True)
    inputs = adapted.inputs(make_batch(task))
    expected = call_layers(adapted, *inputs)
    for layers in (
        pickle.loads(pickle.dumps(adapted.sequential)),
        copy.deepcopy(adapted.sequential),
    ):
        value = inputs
        for layer in layers:
            value = layer(*value)
        assert torch.equal(value, expected)


DROPOUT = {
    "gpt_neox": {"hidden_dropout": 0.5, "use_parallel_residual": False},
    "phi": {"embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "phi3": {"resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "stablelm": {"hidden_dropout": 0.5},
    "starcoder2": {"embedding_dropout": 0.5, "residual_dropout": 0.5},
    "opt": {"dropout": 0.5},
    "bloom": {"hidden_dropout": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.5, "activation_dropout": 0.5},
    "gpt_neox_japanese": {"hidden_dropout": 0.5},
    "persimmon": {"hidden_dropout": 0.5},
    "phimoe": {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5},
    "xglm": {"dropout": 0.5, "activation_dropout": 0.5},
}


@each(DROPOUT)
def test_dropout_is_drawn_where_the_model_draws_it(kind):
    if kind in ("biogpt", "opt", "xglm") and OLD:
        pytest.skip("before 5.24 they draw whether to leave out a block")
    model = make_decoder(kind, **DROPOUT[kind]).train()
    adapted, batch = from_transformers(model, split_blocks=True), make_batch(TEXT)
    adapted.sequential.train()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        found = call_layers(adapted, *adapted.inputs(batch))
        torch.manual_seed(7)
        assert torch.equal(found, model(**batch).logits)


# -- which token classifies a sequence ---------------------------------------------

END = 2


def texts(side, rows=4):
    """Return sentences that end with the token that pads them, as most do."""
    batch = make_batch(CLASSES, rows)
    for row in range(rows):
        length = LENGTHS[row % len(LENGTHS)]
        batch["input_ids"][row, length - 1 :] = END
        if side == "left":
            for name in ("input_ids", "attention_mask"):
                batch[name][row] = batch[name][row].roll(9 - length)
    return batch


@each(["bloom", "falcon", "gpt2", "gpt_neox", "llama", "opt", "qwen3_moe"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_sequence_is_classified_by_the_token_that_the_model_takes(
    kind, side, microbatches
):
    model = make_decoder(kind, CLASSES, pad_token_id=END, eos_token_id=END)
    adapted, batch = from_transformers(model), texts(side)
    expected = model(**batch)
    expected.loss.backward()
    wanted = copy.deepcopy(gradients(model))
    model.zero_grad()
    pipe = pipe_of(adapted, 3, microbatches)
    logits = pipe(*adapted.inputs(batch))
    loss = adapted.loss(logits, adapted.targets(batch))
    loss.backward()
    pipe.close()
    pairs = [(logits, expected.logits), (loss, expected.loss)]
    pairs += [(g, wanted[n]) for n, g in gradients(model).items()]
    for found, own in pairs:
        if microbatches == 1:
            assert torch.equal(found, own)
        else:
            torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)


def test_a_classifier_without_padding_token_is_refused():
    adapted = from_transformers(make_decoder("llama", CLASSES, pad_token_id=None))
    with pytest.raises(ValueError, match=r"expected config.pad_token_id, .* got None"):
        call_layers(adapted, *adapted.inputs(make_batch(CLASSES)))
    adapted.model.config.pad_token_id = PADDING  # it is read when it is needed
    assert call_layers(adapted, *adapted.inputs(make_batch(CLASSES))).shape == (4, 2)


def test_a_language_model_needs_no_padding_token():
    adapted = from_transformers(make_decoder("llama", pad_token_id=None))
    assert exact(adapted, TEXT, 2)


class Ended(Samples):
    """Sentences that end with the token that pads them."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        ids = torch.cat([sample["input_ids"], torch.tensor([END])])
        return {**sample, "input_ids": ids}

    def input_key(self, index, epoch):
        return index


def pad_ended(samples):
    batch = pad(samples)
    there = batch["attention_mask"].bool()
    return {**batch, "input_ids": torch.where(there, batch["input_ids"], END)}


def train_twice(rank, kind, task):
    """Train with the cache, then without it."""
    return trained(kind, task, True), trained(kind, task, False)


def trained(kind, task, cached):
    """Train with blocks that freeze; return losses, evaluations and hits."""
    changes = {"pad_token_id": END, "eos_token_id": END, "num_hidden_layers": 3}
    model = make_decoder(kind, task, torch.float64, **changes)
    found = []
    engine = pt.PipeTransformer(
        from_transformers(model),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        freeze=pt.freeze.Schedule([0, 2, 3]),
        config=pt.Config(
            plan=pt.PlanConfig(num_stages=1, num_microbatches=2),
            cache=pt.CacheConfig(enabled=cached, admission="always"),
        ),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(Ended(24, task), 8, collate_fn=pad_ended):
                engine.step(batch)
            dev = engine.evaluate(Ended(7, task), name="dev", collate_fn=pad_ended)
            found.append(dev["loss"])
        epochs = engine.history.epochs
    return [e.train_loss for e in epochs], found, [e.cache_hits for e in epochs]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "task"),
    [("llama", CLASSES), ("opt", TEXT), ("mamba", TEXT), ("qwen3_5_text", TEXT)],
)
def test_ragged_rows_from_the_cache_train_as_computed_ones(kind, task):
    (((losses, dev, hits), (again, anew, none)),) = Ranks(
        train_twice, 1, kind, task
    ).join()
    near = functools.partial(pytest.approx, rel=1e-6 if task == TEXT else 1e-9)
    assert losses == near(again) and dev == near(anew)
    assert hits[-1] == 24 and not any(none)


def test_adapters_and_the_head_of_a_classifier_train(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, layers_to_transform=[1, 2])
    model = peft.get_peft_model(make_decoder("llama", CLASSES), config)
    adapted = from_transformers(model, split_blocks=True)
    assert exact(adapted, CLASSES, 3)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any("score.modules_to_save" in name for name in trained)
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    adapted.export(tmp_path, merge=True)
    kind = transformers.AutoModelForSequenceClassification
    plain = kind.from_pretrained(tmp_path)
    batch = make_batch(CLASSES)
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).logits, model.eval()(**batch).logits)


# -- what cannot be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("mixtral", "output_router_logits", True),
        ("gpt2", "add_cross_attention", True),
        ("opt", "layerdrop", 0.1),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma4_text", "hidden_size_per_layer_input", 8),
        ("gemma4_text", "num_kv_shared_layers", 1),
        ("biogpt", "layerdrop", 0.1),
        ("bamba", "z_loss_coefficient", 0.1),
    ],
)
def test_what_layers_cannot_do_as_the_model_does_is_refused(kind, name, value):
    model = make_decoder(kind, **{name: value})
    with pytest.raises(ValueError, match=rf"config.{name}=.*, since .* got {value}"):
        from_transformers(model)


def test_padding_that_is_not_the_configs_is_refused():
    adapted = from_transformers(make_decoder("llama", CLASSES, pad_token_id=5))
    with pytest.raises(ValueError, match="config.pad_token_id=5 behind the end"):
        adapted.inputs(make_batch(CLASSES))
    left = {n: t.flip(1) if t.dim() > 1 else t for n, t in make_batch(CLASSES).items()}
    adapted.inputs(left)  # padding in front is never the last token
