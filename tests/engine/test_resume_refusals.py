"""What does not load at a resume is named, and costs no checkpoint."""

import functools
import re

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import tensor_files as files
from pipetransformer.state.state import describe_optimizer
from tests.engine.scenario import config
from tests.support.private import inject, run_of
from tests.support.toy import ToySet, toy_model

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
RATES = torch.optim.lr_scheduler


def engine_of(folder=None, *, optimizer=ADAMW, rates=None, freeze=None):
    wanted = pt.CheckpointConfig(directory=folder, resume=folder is not None)
    return pt.PipeTransformer(
        toy_model(1),
        optimizer=optimizer,
        lr_scheduler=rates,
        loss=nn.CrossEntropyLoss(),
        freeze=freeze or pt.freeze.Never(),
        config=config(checkpoint=wanted),
    )


class Counter:
    """Counts; its state does not load where the test says so."""

    def __init__(self, *, fails=False):
        self.count, self.fails = 0, fails

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        if self.fails:
            raise KeyError("a mistake of the script's")
        self.count = state["count"]


def train(engine, counter, epochs):
    engine.register("counter", counter)
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
                counter.count += 1
        state = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]
        return int(state["step"])


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_resume_that_fails_leaves_the_checkpoint_and_can_be_made_again(
    tmp_path, caplog
):
    train(engine_of(tmp_path), Counter(), 1)
    before = snapshot(tmp_path)
    with pytest.raises(RuntimeError, match="states of counter, got what does not load"):
        train(engine_of(tmp_path), Counter(fails=True), 2)
    assert snapshot(tmp_path) == before
    path = checkpoint.path_of_step(tmp_path, 2)
    assert f"no emergency checkpoint: checkpoint {path} did not load" in caplog.text
    counter = Counter()
    assert train(engine_of(tmp_path), counter, 2) == counter.count == 4


def test_a_state_that_is_half_loaded_is_not_saved_by_hand_either(tmp_path):
    train(engine_of(tmp_path), Counter(), 1)
    engine = engine_of(tmp_path)
    engine.register("counter", Counter(fails=True))
    with pytest.raises(ValueError, match="save: expected a state that is loaded whole"):
        with engine:
            with pytest.raises(RuntimeError, match="states of counter"):
                engine.prepare(ToySet(8), 4)
            engine.save(tmp_path / "by hand.pt")
    assert not (tmp_path / "by hand.pt").exists()


def test_an_error_before_the_first_step_leaves_the_file_that_was_loaded(
    tmp_path, caplog
):
    train(engine_of(tmp_path), Counter(), 1)
    before = snapshot(tmp_path)
    with pytest.raises(ZeroDivisionError), engine_of(tmp_path) as engine:
        engine.prepare(ToySet(8), 4)
        raise ZeroDivisionError
    assert snapshot(tmp_path) == before
    assert "no emergency checkpoint: no step was taken since" in caplog.text


def test_an_error_in_the_plan_after_the_load_leaves_the_file(tmp_path):
    train(engine_of(tmp_path), Counter(), 1)
    before = snapshot(tmp_path)

    def fail(*_):
        raise ZeroDivisionError

    old = inject("rewire", fail)
    try:
        with pytest.raises(RuntimeError, match="got ZeroDivisionError"):
            train(engine_of(tmp_path), Counter(), 2)
    finally:
        inject("rewire", old)
    assert snapshot(tmp_path) == before


def saved(path, **options):
    with engine_of(**options) as engine:
        for batch in engine.batches(ToySet(8), 4):
            engine.step(batch)
        engine.save(path)
    return path


def by_rank(parameters, *, biases_first=False):
    """Return AdamW with two groups of as many parameters: matrices and biases."""
    parts = [[p for p in parameters if (p.dim() > 1) is kind] for kind in (True, False)]
    parts[1] = parts[1][: len(parts[0])]
    groups = [{"params": part} for part in parts]
    return ADAMW(groups[::-1] if biases_first else groups)


def without_biases(parameters):
    return ADAMW([p for p in parameters if p.dim() > 1])


ANOTHER = {
    "class": (
        {},
        {"optimizer": torch.optim.RAdam},
        "the state of the optimizer RAdam, as here, got AdamW",
    ),
    "groups": (
        {"optimizer": by_rank},
        {"optimizer": functools.partial(by_rank, biases_first=True)},
        "in group 0 of the optimizer 0.bias, as here, got 0.weight",
    ),
    "sizes": (
        {},
        {"optimizer": without_biases},
        "groups of parameters of [4], as here, got [12]",
    ),
    "scheduler": (
        {"rates": lambda o: RATES.StepLR(o, 1)},
        {"rates": lambda o: RATES.SequentialLR(o, [RATES.StepLR(o, 1)] * 2, [1])},
        "the state of an lr_scheduler SequentialLR, as here, got that of StepLR",
    ),
    "policy": (
        {},
        {"freeze": pt.freeze.Guarded()},
        "the state of Guarded, as here, by Never where it was written, got what does "
        "not load: ValueError: policy state: expected the entries",
    ),
}


@pytest.mark.parametrize("kind", ANOTHER)
def test_another_optimizer_or_scheduler_is_refused_before_anything_is_loaded(
    kind, tmp_path
):
    one, other, text = ANOTHER[kind]
    path = saved(tmp_path / "saved.pt", **one)
    with engine_of(**other) as engine:
        before = engine.state_dict()
        wanted = re.escape(f"checkpoint {path}: expected {text}")
        with pytest.raises(ValueError, match=f"^{wanted}"):
            engine.load(path)
        assert run_of(engine).loaded is None and run_of(engine).state.step == 0
        torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)


def constant(optimizer):
    return RATES.ConstantLR(optimizer, factor=0.5, total_iters=9)


@pytest.mark.parametrize(
    ("one", "other", "text", "rate"),
    [
        ({}, {"rates": constant}, "without an lr_scheduler: ConstantLR begins", 5e-3),
        ({"rates": constant}, {}, "the state of ConstantLR, and there is none", 5e-3),
    ],
)
def test_a_scheduler_on_one_side_alone_is_told(
    one, other, text, rate, tmp_path, caplog
):
    path = saved(tmp_path / "saved.pt", **one)
    with engine_of(**other) as engine:
        engine.load(path)
        engine.prepare(ToySet(8), 4)
        assert engine.optimizer.param_groups[0]["lr"] == rate
    assert caplog.text.count(text) == 1


def test_another_policy_whose_state_loads_is_told(tmp_path, caplog):
    path = saved(tmp_path / "saved.pt", freeze=pt.freeze.Schedule([0, 1]))
    with engine_of() as engine:
        engine.load(path)
    assert "freezing goes on by Never, and was decided by Schedule" in caplog.text
    caplog.clear()
    with engine_of(freeze=pt.freeze.Schedule([0])) as engine:
        engine.load(path)
    assert "freezing goes on" not in caplog.text


@pytest.mark.parametrize("kinds", [3, {"policy": 1, "scheduler": ""}, {"policy": ""}])
def test_kinds_that_no_run_writes_so_are_refused(kinds, tmp_path):
    path = changed(saved(tmp_path / "saved.pt"), {"kinds": kinds})
    with pytest.raises(ValueError, match="kinds to be names of classes"):
        checkpoint.read(path)


def changed(path, optimizer):
    content = torch.load(path, weights_only=True)
    if "kinds" not in optimizer:
        del content["extra"]["optimizer"]
    content["extra"].update(optimizer)
    files.write(path, content)
    return path


def test_an_older_checkpoint_tells_of_options_alone(tmp_path):
    path = changed(saved(tmp_path / "saved.pt"), {})
    with engine_of() as engine:
        engine.load(path)
        engine.prepare(ToySet(8), 4)
        assert run_of(engine).state.step == 2
    with engine_of(optimizer=torch.optim.SGD) as engine:
        with pytest.raises(ValueError, match="of another optimizer, without dampening"):
            engine.load(path)


@pytest.mark.parametrize(
    "found", [5, {"kind": 3, "groups": []}, {"kind": "A", "groups": [["a", 3]]}]
)
def test_an_optimizer_that_no_run_describes_so_is_refused(found, tmp_path):
    path = changed(saved(tmp_path / "saved.pt"), {"optimizer": found})
    with pytest.raises(ValueError, match="optimizer to be a class and names by group"):
        checkpoint.read(path)


def test_the_same_optimizer_in_groups_goes_on(tmp_path):
    path = saved(tmp_path / "saved.pt", optimizer=by_rank)
    with engine_of(optimizer=by_rank) as engine:
        engine.load(path)
        engine.prepare(ToySet(8), 4)
        assert run_of(engine).state.step == 2


def test_the_description_names_what_is_not_the_models():
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Parameter(torch.ones(2))
    found = describe_optimizer(ADAMW([*model.parameters(), other]), model)
    names = ["0.weight", "0.bias", "none of the model"]
    assert found == {"kind": "AdamW", "groups": [names]}
