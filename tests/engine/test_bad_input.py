"""Each user mistake is one clear error; the texts are the interface."""

import os
import re

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import pipetransformer as pt
from pipetransformer.pipe import PipeSequential
from pipetransformer.transformation import phases as transformation
from tests.engine.scenario import config, make_engine
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model


def build(model, **changes):
    options = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "loss": nn.CrossEntropyLoss(),
        "freeze": pt.freeze.Never(),
        **changes,
    }
    return pt.PipeTransformer(model, **options)


def test_model_must_be_a_sequential():
    with pytest.raises(TypeError, match="model: expected an nn.Sequential, got Linear"):
        build(nn.Linear(2, 2))


def test_model_must_not_be_empty():
    with pytest.raises(ValueError, match="expected at least one layer, got an empty"):
        build(nn.Sequential())


def test_model_must_not_repeat_a_layer():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="different layers, got the same one twice"):
        build(nn.Sequential(layer, layer))


class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x / 255)


class Called(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x / 255)


def patched(*layers):
    model = nn.Sequential(*layers)
    model.forward = lambda x: x
    return model


@pytest.mark.parametrize("kind", [Scaled, Called, patched])
def test_a_sequential_with_a_forward_of_its_own_is_refused(kind):
    text = "model: expected an nn.Sequential whose layers are called .* of its own"
    with pytest.raises(ValueError, match=text):
        build(kind(nn.Linear(2, 2), nn.Linear(2, 2)))


class NoForward(nn.Sequential):
    pass


@pytest.mark.parametrize("kind", [NoForward, PipeSequential])
def test_other_subclasses_of_a_sequential_are_taken(kind):
    build(kind(Scaled(nn.Linear(2, 2)), nn.Linear(2, 2)))


def test_a_parameter_of_the_sequential_itself_is_refused_unless_a_layer_has_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_parameter("first", model[0].weight)
    fixed = nn.Parameter(torch.ones(()), requires_grad=False)
    model.register_parameter("fixed", fixed)
    build(model)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    text = "model: expected all parameters in its layers, got .* itself, scale, which"
    with pytest.raises(ValueError, match=text):
        build(model)


def test_hooks_of_the_sequential_itself_are_warned_of(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    build(model)
    assert not caplog.records
    model.register_forward_pre_hook(lambda *_: None)
    build(model)
    assert "expected no hooks of the Sequential itself" in caplog.text


def test_compiled_sequential_is_refused():
    model = toy_model(2)
    with pytest.raises(TypeError, match="got a compiled one; compile its layers"):
        build(torch.compile(model))
    model.compile()
    with pytest.raises(TypeError, match="got a compiled one; compile its layers"):
        build(model)


def look_up(rank, most=None):
    table = nn.Embedding(8, 4, max_norm=1.0)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 2))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=nn.functional.cross_entropy,
        freeze=pt.freeze.Never(),
        config=config(plan=pt.PlanConfig(num_stages=1, max_replicas=most)),
    )
    data = [(torch.tensor([i, i + 1, 7 - i]), i % 2) for i in range(7)]
    try:
        with engine:
            engine.prepare(data, 4)
            return "planned"
    except (ValueError, pt.PeerFailure) as error:
        return str(error)


@pytest.mark.distributed
def test_rows_that_replicas_would_scale_apart_are_refused():
    text = "expected no max_norm with several replicas, got 0 with max_norm=1"
    assert all(text in told for told in run_ranks(look_up, 2))
    assert run_ranks(look_up, 2, 1) == ["planned"] * 2
    assert look_up(0) == "planned", "there is one replica at most"


def test_a_parameter_that_comes_later_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=nn.functional.cross_entropy,
        freeze=pt.freeze.Never(),
        config=config(),
    )
    text = "expected all parameters that train when the engine is made, got 1.late"
    with engine:
        for epoch in engine.epochs(2):
            if epoch == 1:
                model[1].late = nn.Parameter(torch.ones(2))
                with pytest.raises(ValueError, match=text):
                    next(iter(engine.batches(ToySet(24), 12)))
                break
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)


def test_sync_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="expected no nn.SyncBatchNorm .*, got 1"):
        build(model)


def test_lazy_layers_that_have_not_run_are_refused():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="known shapes, got a lazy layer's 0.weight"):
        build(model)
    model(torch.zeros(3, 5))
    build(model)


def test_nothing_trainable_is_refused():
    with pytest.raises(ValueError, match="expected a trainable parameter, got none"):
        build(nn.Sequential(nn.ReLU()))


def test_freeze_is_a_policy():
    with pytest.raises(TypeError, match="freeze: expected a policy .* got float"):
        build(toy_model(2), freeze=1 / 3)


def test_optimizer_must_be_a_factory():
    model = toy_model(2)
    with pytest.raises(TypeError, match="optimizer: expected a factory, got a built"):
        build(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


class NeedsLosses(torch.optim.SGD):
    def step(self, losses, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("factory", "got"),
    [
        (torch.optim.LBFGS, "LBFGS, whose step needs closure"),
        (lambda params: NeedsLosses(params, lr=0.1), "NeedsLosses, whose .* losses"),
    ],
)
def test_optimizer_must_step_from_gradients_alone(factory, got):
    text = f"optimizer: expected one that steps from gradients .* or AdamW, got {got}"
    with pytest.raises(TypeError, match=text):
        build(toy_model(2), optimizer=factory)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam", "RMSprop", "Adagrad"])
def test_optimizers_that_may_take_a_closure_are_accepted(name):
    build(toy_model(2), optimizer=getattr(torch.optim, name))


def test_the_optimizer_before_the_first_plan_tells_how_to_make_one():
    text = r"optimizer: expected a plan, got none .*; engine.prepare\(.*\) makes one"
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match=text):
            engine.optimizer  # noqa: B018  # a property that raises
        engine.prepare(ToySet(12), 4)
        assert engine.optimizer.param_groups


def test_less_than_a_batch_that_is_dropped_is_refused():
    text = "batch_size: expected at most the 10 samples .* drop_last=True, got 12"
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match=text):
            next(engine.batches(ToySet(10), 12, drop_last=True))
        with pytest.raises(ValueError, match=text):
            engine.prepare(ToySet(10), 12, drop_last=True)
    with make_engine(freeze=pt.freeze.Never()) as engine:
        assert len(list(engine.batches(ToySet(12), 12, drop_last=True))) == 1


def test_no_error_shows_a_whole_plan(monkeypatch):
    """A plan has dozens of candidates; its one-line description names it."""

    def broken(*_):
        raise OSError("no more threads")

    monkeypatch.setattr(transformation, "rewire", broken)
    text = r"plan epoch 1: .* committed plan \(K=1 R=1 M=\d+ layers 0-7\), got OSError"
    with (
        pytest.raises(RuntimeError, match=text) as caught,
        make_engine(freeze=pt.freeze.Never()) as engine,
    ):
        engine.prepare(ToySet(12), 12)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("alpha", [-0.1, 1.0, 1.5, float("nan")])
def test_alpha_must_be_in_zero_to_one(alpha):
    with pytest.raises(ValueError, match=r"alpha: expected a number in \[0, 1\), got"):
        pt.freeze.AlphaCap(alpha=alpha, gradient_term=False)


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(3)


class NoLength:
    def __getitem__(self, index):
        return index, index


@pytest.mark.parametrize("dataset", [Endless(), NoLength()])
def test_dataset_must_be_map_style_with_a_length(dataset):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(TypeError, match="dataset: expected"):
            next(iter(engine.batches(dataset, 4)))


def first_batch(**changes):
    engine = make_engine(freeze=pt.freeze.Never(), config=config(**changes))
    with engine:
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)


def test_more_stages_than_devices_are_refused():
    with pytest.raises(ValueError, match="num_stages: expected .* got 3"):
        first_batch(plan=pt.PlanConfig(num_stages=3))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="num_stages: expected .* got 9"):
        first_batch(plan=pt.PlanConfig(num_stages=9), pipe=pt.PipeConfig(num_slots=16))


def test_more_micro_batches_than_samples_are_refused():
    with pytest.raises(ValueError, match="micro-batches"):
        first_batch(
            plan=pt.PlanConfig(num_stages=2, num_microbatches=8),
            pipe=pt.PipeConfig(num_slots=2),
        )


def test_model_that_fits_nowhere_is_refused():
    with pytest.raises(pt.InfeasiblePlan, match="bytes"):
        first_batch(plan=pt.PlanConfig(slot_memory_bytes=100))


def test_forced_cut_between_tied_layers_is_refused():
    model = toy_model(2)
    model[2].up.weight = model[1].up.weight
    engine = build(
        model,
        config=config(
            plan=pt.PlanConfig(num_stages=2, cuts=(0, 2, 4)),
            pipe=pt.PipeConfig(num_slots=2),
        ),
    )
    with (
        pytest.raises(ValueError, match="forced cut at layer 2: expected no parameter"),
        engine,
    ):
        next(iter(engine.batches(ToySet(12), 4)))


def test_loss_must_be_a_scalar():
    engine = make_engine(
        freeze=pt.freeze.Never(), loss=nn.CrossEntropyLoss(reduction="none")
    )
    with pytest.raises(ValueError, match="loss: expected a scalar mean over rows"):
        with engine:
            for batch in engine.batches(ToySet(12), 4):
                engine.step(batch)


def test_nan_loss_stops_before_the_step_and_keeps_the_checkpoint(tmp_path):
    def loss(outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        return value * float("nan") if engine.history.epochs else value

    engine = make_engine(
        freeze=pt.freeze.Never(),
        loss=loss,
        config=config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path))),
    )
    expected = r"loss: expected a finite value, got nan at step 3 on rank 0"
    with pytest.raises(FloatingPointError, match=expected), engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(12), 4):
                engine.step(batch)
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000003.pt"]
    weights = torch.load(tmp_path / "step-0000000003.pt", weights_only=True)["model"]
    assert all(torch.isfinite(value).all() for value in weights.values())


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize(
    ("clip", "expected", "step"),
    [
        (1.0, "gradients: expected finite values, got a norm of nan at step 3", 3),
        (None, "loss: expected a finite value, got nan at step 4", None),
    ],
)
def test_nan_gradients_stop_before_the_step_where_they_are_clipped(
    clip, expected, step, tmp_path
):
    def loss(outputs, targets):
        if engine.history.epochs:
            outputs = NanBackward.apply(outputs)
        return nn.functional.cross_entropy(outputs, targets)

    engine = make_engine(
        freeze=pt.freeze.Never(),
        loss=loss,
        config=config(
            clip_grad_norm=clip,
            checkpoint=pt.CheckpointConfig(directory=str(tmp_path), every_epochs=9),
        ),
    )
    with pytest.raises(FloatingPointError, match=expected), engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(12), 4):
                engine.step(batch)
    kept = [path.name for path in tmp_path.iterdir()]
    assert kept == ([] if step is None else [f"step-{step:010}.pt"])


def test_a_norm_that_overflows_is_no_error():
    engine = make_engine(
        freeze=pt.freeze.Never(),
        loss=lambda outputs, targets: outputs.mean() * 1e30,
        config=config(clip_grad_norm=1.0, check_loss=False),
    )
    with engine:
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)
        assert all(value.isfinite().all() for value in engine.state_dict().values())


def test_closed_engine_refuses_everything():
    engine = make_engine(freeze=pt.freeze.Manual())
    expected = "engine: expected a call inside its with block, got an engine that is "
    with pytest.raises(ValueError, match=expected + "not open yet"):
        engine.step(torch.zeros(1, 4), torch.zeros(1))
    with engine:
        pass
    for call in (
        lambda: engine.freeze(1),
        lambda: engine.step(torch.zeros(1, 4), torch.zeros(1)),
        lambda: engine.evaluate(ToySet(4)),
        lambda: engine.predict(ToySet(4)),
        lambda: next(engine.epochs(1)),
        lambda: next(iter(engine.batches(ToySet(4), 2))),
        lambda: engine.save("nowhere"),
    ):
        with pytest.raises(ValueError, match=expected + "closed"):
            call()
    with pytest.raises(ValueError, match="one use per engine"):
        engine.__enter__()


def test_freeze_needs_the_manual_policy():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(TypeError, match="expected the Manual policy, got Never"):
            engine.freeze(1)


def test_metric_must_give_one_value_per_row():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.prepare(ToySet(8), 4)
        with pytest.raises(ValueError, match=r"metric 'm': expected one value per row"):
            engine.evaluate(ToySet(4), {"m": lambda o, t: o.sum()})


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda outputs, targets: 0.5, "float"),
        (lambda outputs, targets: (outputs.sum(), {}), "tuple"),
    ],
)
def test_a_loss_that_is_no_tensor_is_refused(loss, got):
    engine = make_engine(freeze=pt.freeze.Never(), loss=loss)
    with pytest.raises(TypeError, match=f"loss: expected a scalar tensor .*got {got}"):
        with engine:
            for batch in engine.batches(ToySet(4), 4):
                engine.step(batch)


def _evaluate_without_a_plan(rank, call):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        try:
            getattr(engine, call)(ToySet(4))
        except ValueError as error:
            told = str(error)
        engine.prepare(ToySet(8), 4)
        getattr(engine, call)(ToySet(4))
    return told


@pytest.mark.distributed
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_calls_before_the_first_plan_are_refused_on_every_rank(call):
    text = f"{call}: expected a plan, got none before the first pass; engine.prepare"
    for told in run_ranks(_evaluate_without_a_plan, 2, call):
        assert text in told and "where a resumed run had finished" in told


def test_a_loop_that_takes_a_batch_apart_is_told_what_to_write():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        told = (
            r"batch: expected engine\.step\(batch\).*batch\.inputs and batch\.targets"
        )
        with pytest.raises(TypeError, match=told):
            for inputs, targets in engine.batches(ToySet(4), 4):
                engine.step(inputs, targets)


def test_unknown_config_values_are_refused():
    with pytest.raises(ValueError, match="PipeConfig.checkpoint: expected 'always'"):
        pt.PipeConfig(checkpoint="sometimes")
    with pytest.raises(ValueError, match="Config.eval_microbatch_rows: expected >= 1"):
        pt.Config(eval_microbatch_rows=0)


def _open_with(rank, kind):
    if kind == "nodes" and rank == 1:
        os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK="1")
    plan = pt.PlanConfig(max_replicas=1 + rank) if kind == "plan" else None
    settings = config(seed=rank if kind == "config" else 3, plan=plan)
    depth = 3 + rank if kind == "depth" else 3
    dtype = torch.float64 if kind == "dtype" and rank == 1 else torch.float32
    try:
        with make_engine(
            freeze=pt.freeze.Never(), config=settings, depth=depth, dtype=dtype
        ):
            return "opened"
    except ValueError as error:
        return str(error)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("config", "expected 'Config.seed = 0' (rank 0), got 'Config.seed = 1'"),
        ("plan", "'Config.plan.max_replicas = 1' (rank 0), got 'Config.plan.max_rep"),
        ("depth", "parameter 4"),
        ("dtype", "torch.float64"),
        ("nodes", "processes per node 2"),
    ],
)
def test_models_and_configs_that_differ_are_refused_on_every_rank(kind, text):
    messages = run_ranks(_open_with, 2, kind)
    assert messages[0] == messages[1]
    assert messages[0].startswith("model and config of rank 1: expected ")
    assert text in messages[0]


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (torch.eye(4).to_sparse(), "got 0.table of layout torch.sparse_coo, which"),
        (torch.zeros(1, 4).expand(3, 4), "got 0.table as `expand` makes it; register"),
    ],
)
def test_buffers_that_no_replica_could_be_given_are_refused(buffer, text):
    layer = nn.Linear(4, 3)
    layer.register_buffer("table", buffer)
    with pytest.raises(ValueError, match=re.escape(text)):
        pt.PipeTransformer(
            nn.Sequential(layer), optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss()
        )


class NoBase(pt.freeze.Policy):
    def __init__(self):
        self.mine = 1

    def _choose(self, progress, stats):
        return 0


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"loss": nn.CrossEntropyLoss},
            TypeError,
            "loss: .* got the class CrossEntropyLoss; make one: CrossEntropyLoss()",
        ),
        ({"freeze": pt.freeze.Guarded}, TypeError, "freeze: .* got the class Guarded"),
        (
            {"callbacks": pt.report.Callback()},
            TypeError,
            "callbacks: expected a sequence of pt.report.Callback, got Callback",
        ),
        ({"callbacks": 3}, TypeError, "callbacks: expected a sequence .* got int"),
        (
            {"freeze": NoBase()},
            TypeError,
            r"policy: expected NoBase.__init__ to call super\(\).__init__\(\) first",
        ),
    ],
)
def test_plausible_mistakes_are_told_in_words(changes, error, text):
    with pytest.raises(error, match=text):
        build(toy_model(2), **changes)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got 0.weight on the meta device; call"):
        build(model)


def test_wrong_calls_within_the_block_are_told_in_words():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match="at least one sample, got an empty data"):
            next(engine.batches(ToySet(0), 4))
        next(engine.batches(ToySet(12), 4))
        for metrics in (len, ["accuracy"], {"accuracy": "mean"}):
            with pytest.raises(TypeError, match="metrics: expected functions by name"):
                engine.evaluate(ToySet(4), metrics)
        with pytest.raises(TypeError, match="engine.loss: expected a batch of engine"):
            engine.loss(None)
    with pytest.raises(TypeError, match="counts: expected a list, .* got int"):
        pt.freeze.Schedule(3)
    with pytest.raises(TypeError, match="history: expected engine.history, got NoneT"):
        pt.report.write_summary(None, "nowhere/summary.json")


def _train_on(rank, kind):
    size, batch = (24 - rank, 12) if kind == "samples" else (24, 12 - rank)
    try:
        with make_engine(freeze=pt.freeze.Never()) as engine:
            for each in engine.batches(ToySet(size), batch):
                engine.step(each)
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("samples", '"num_samples": 23, "batch_size": 12, "drop_last": false}'),
        ("batch", '"num_samples": 24, "batch_size": 11, "drop_last": false}'),
    ],
)
def test_batches_that_differ_between_ranks_are_refused_on_all(kind, text):
    """Both have two batches, of samples that would meet twice or never."""
    first, second = run_ranks(_train_on, 2, kind)
    assert first == second
    assert first.startswith('batches: expected {"num_samples": 24, "batch_size": 12,')
    assert first.endswith(f"on every rank, as on rank 0, got {{{text} on rank 1")
