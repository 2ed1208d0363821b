"""A state that nobody could read back costs no file, and no run that goes on."""

import dataclasses
import logging

import numpy
import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.state.state import UnreadableState
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model


@dataclasses.dataclass
class Projector:
    """What an optimizer may put into its state at the first step."""

    rank: int = 4


class Projected(torch.optim.SGD):
    """Keeps an object for each parameter from the step on that the test names."""

    def __init__(self, parameters, since):
        super().__init__(parameters, lr=0.1)
        self.steps, self.since = 0, since

    def step(self, closure=None):
        self.steps += 1
        if self.steps >= self.since:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["projector"] = Projector()
        return super().step(closure)


class Best:
    """Keeps a value, as scripts do with the best loss."""

    def __init__(self):
        self.best = float("inf")

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


def engine_in(folder, since, **wanted):
    return pt.PipeTransformer(
        toy_model(1),
        optimizer=lambda parameters: Projected(parameters, since),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(checkpoint=pt.CheckpointConfig(directory=folder, **wanted)),
    )


def train(engine, epochs):
    for _ in engine.epochs(epochs):
        for batch in engine.batches(ToySet(8), 8):
            engine.step(batch)


NAMED = (
    "training state: expected tensors and plain values, got Projector at "
    "['optimizer']['state'][0]['projector']"
)


def test_files_that_can_be_read_stay_and_the_run_ends_by_an_error_that_names_the_part(
    tmp_path, caplog
):
    with pytest.raises(UnreadableState) as caught:
        with engine_in(tmp_path, since=3, keep=2) as engine:
            train(engine, 9)
    assert str(caught.value) == NAMED
    assert sorted(path.name[-4:-3] for path in tmp_path.iterdir()) == ["1", "2"]
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None and found[1]["progress"]["step"] == 2
    own = [r for r in caplog.records if r.name == "pipetransformer.checkpoint.autosave"]
    texts = [record.getMessage() for record in own]
    assert len(texts) == 3 and all(NAMED in text for text in texts)
    assert texts[-1].startswith("emergency checkpoint")


def test_a_save_by_hand_says_at_once_what_could_not_be_read(tmp_path):
    with engine_in(None, since=1) as engine:
        train(engine, 1)
        with pytest.raises(UnreadableState, match="got Projector at"):
            engine.save(tmp_path / "saved.pt")
    assert not list(tmp_path.iterdir())


class Told(nn.Linear):
    """Adds to its state_dict what no file gives back."""

    def get_extra_state(self):
        return Projector()

    def set_extra_state(self, state):
        pass


def test_what_a_module_adds_to_its_state_is_looked_at_too(tmp_path):
    engine = pt.PipeTransformer(
        nn.Sequential(nn.Linear(4, 8), Told(8, 3)),
        optimizer=torch.optim.SGD,
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    )
    with engine:
        train(engine, 1)
        text = r"Projector at \['model'\]\['1._extra_state'\]"
        with pytest.raises(UnreadableState, match=text):
            engine.save(tmp_path / "saved.pt")


def test_a_number_of_numpy_that_a_script_comes_to_register_is_saved_and_resumed(
    tmp_path,
):
    best = Best()
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        engine.register("best", best)
        train(engine, 1)
        best.best = numpy.mean([0.25, 0.75])
        engine.save(tmp_path / "saved.pt")
    again = Best()
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        engine.register("best", again)
        engine.load(tmp_path / "saved.pt")
        engine.prepare(ToySet(8), 8)
    assert again.best == 0.5 and type(again.best) is float


def grow(rank, value):
    """Train; from the second epoch on replicas are to join. Return what became."""
    logging.disable(logging.WARNING)
    settings = config(plan=pt.PlanConfig(slot_memory_bytes=27_000, reshape="always"))
    best, seen = Best(), []
    engine = make_engine(freeze=schedule(0, 6), config=settings)
    engine.register("best", best)
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
                best.best = value
            seen.append(engine.plan is not None and engine.plan.num_replicas)
        reasons = [record.reason for record in engine.history.aborted]
    return seen, reasons, best.best


@pytest.mark.distributed
def test_a_state_that_could_not_be_given_refuses_the_change_and_the_run_goes_on():
    results = run_ranks(grow, 2, Projector())
    seen, reasons, _ = results[0]
    assert seen == [1, 1, 1] and results[1][0] == [False] * 3
    assert reasons and all("Projector at ['registered']" in text for text in reasons)


@pytest.mark.distributed
def test_a_number_of_numpy_goes_to_ranks_that_join():
    results = run_ranks(grow, 2, numpy.float64(0.25))
    assert results[0][0] == [1, 2, 2]
    assert [best for _, _, best in results] == [0.25, 0.25]
