"""A loop may take batches before it steps with those it has: a step says with which."""

import itertools

import pytest
import torch

import pipetransformer as pt
from tests.engine.losses import SURVIVING
from tests.engine.scenario import config, make_engine, moments, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

DATA = ToySet(50, dtype=torch.float64)
BATCH, NUM_BATCHES = 12, 5
TOLD = ("samples", "unique_samples", "optimizer_steps", "train_loss")


def one_ahead(batches):
    """Yield each batch when the one after it was taken, as prefetchers do."""
    batches = iter(batches)
    held = next(batches, None)
    while held is not None:
        following = next(batches, None)
        yield held
        held = following


def in_pairs(batches):
    """Yield batches as they come, taken two at a time."""
    batches = iter(batches)
    while pair := list(itertools.islice(batches, 2)):
        yield from pair


READERS = {"one ahead": one_ahead, "in pairs": in_pairs, "all at once": list}


def with_step(engine, batch):
    engine.step(batch)


def by_hand(engine, batch):
    engine.backward(engine.loss(batch))
    engine.update()


def with_model(engine, batch):
    out = engine.model(batch)
    engine.backward(torch.nn.functional.cross_entropy(out, batch.targets))
    engine.update()


def train(rank, read, *, use=with_step, freeze=None, only=None, epochs=2, **settings):
    """Train; return moments, what records tell, and the batches stepped with."""
    engine = make_engine(
        freeze=freeze or schedule(0), dtype=torch.float64, config=config(**settings)
    )
    seen = []
    with engine:
        for epoch in engine.epochs(epochs):
            for batch in read(engine.batches(DATA, BATCH)):
                if only is not None and batch.index not in only:
                    continue
                use(engine, batch)
                seen.append((epoch, batch.index))
        last = moments(engine)
    told = [
        {name: record[name] for name in TOLD}
        for record in engine.history.to_json()["epochs"]
    ]
    return last, told, seen


def assert_same(one, other):
    assert one[1:] == other[1:]
    for name in ("weights", "tensors"):
        for a, b in zip(one[0][name], other[0][name], strict=True):
            assert torch.equal(a, b)
    assert one[0]["step"] == other[0]["step"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_loop_that_reads_ahead_trains_and_counts_like_one_that_does_not(
    reader, steps
):
    plain = train(0, iter, accumulation_steps=steps)
    assert [each["samples"] for each in plain[1]] == [50, 50]
    assert_same(train(0, READERS[reader], accumulation_steps=steps), plain)


def test_a_batch_may_be_taken_between_backward_and_step():
    engine = make_engine(freeze=schedule(0), dtype=torch.float64, config=config())
    with engine:
        for _ in engine.epochs(2):
            batches = iter(engine.batches(DATA, BATCH))
            batch = next(batches)
            while batch is not None:
                engine.backward(engine.loss(batch))
                following = next(batches, None)
                engine.update()
                assert run_of(engine).state.batch == batch.index + 1
                batch = following
        last = moments(engine)
    for a, b in zip(
        last["weights"], train(0, iter, use=by_hand)[0]["weights"], strict=True
    ):
        assert torch.equal(a, b)
    for record in engine.history.epochs:
        assert (record.samples, record.optimizer_steps) == (50, NUM_BATCHES)


@pytest.mark.parametrize("use", [by_hand, with_model])
@pytest.mark.parametrize("reader", READERS)
def test_a_loop_of_the_users_own_may_read_ahead(reader, use):
    assert_same(train(0, READERS[reader], use=use), train(0, iter, use=use))


def test_a_process_that_is_alone_may_read_ahead_where_plans_change_within_a_pass():
    settings = {"freeze": schedule(0, 2, 4, 6), "freeze_every": 2}
    plain = train(0, iter, **settings)
    settings["freeze"] = schedule(0, 2, 4, 6)
    assert_same(train(0, one_ahead, **settings), plain)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("stop", [0, 2, 4])
def test_a_run_that_reads_ahead_is_resumed_with_the_batch_after_its_last_step(
    reader, stop, tmp_path
):
    wanted = pt.CheckpointConfig(directory=tmp_path, resume=True)
    whole, seen = train(0, iter), []

    def stopping(engine, batch):
        engine.step(batch)
        seen.append(batch.index)
        if batch.index == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(0, READERS[reader], use=stopping, checkpoint=wanted)
    last, _, rest = train(0, READERS[reader], checkpoint=wanted)
    taken = [(0, index) for index in seen] + rest
    assert taken == whole[2]
    for name in ("weights", "tensors"):
        for a, b in zip(last[name], whole[0][name], strict=True):
            assert torch.equal(a, b)


def test_checkpoints_between_batches_have_the_batches_that_were_stepped(tmp_path):
    wanted = pt.CheckpointConfig(directory=tmp_path, every_steps=2, keep=9)
    train(0, one_ahead, epochs=1, checkpoint=wanted)
    saved = {
        path.name: torch.load(path, weights_only=True)["progress"]
        for path in tmp_path.iterdir()
    }
    within = {n: told["batch"] for n, told in saved.items() if told["epoch"] == 0}
    # The end of the epoch saves what comes after the last batch was taken.
    assert within == {"step-0000000002.pt": 2}


TWO = pt.PlanConfig(num_stages=1, replicas="all")


def train_on_two(rank, reader, settings):
    return train(rank, {"plain": iter, **READERS}[reader], plan=TWO, **settings)


@pytest.mark.distributed
@pytest.mark.parametrize("steps", [1, 2])
def test_replicas_that_read_ahead_train_like_replicas_that_do_not(steps):
    settings = {"accumulation_steps": steps}
    plain = run_ranks(train_on_two, 2, "plain", settings)
    for reader in READERS:
        ahead = run_ranks(train_on_two, 2, reader, settings)
        for one, other in zip(ahead, plain, strict=True):
            assert_same(one, other)


CHANGING = {
    "Config.freeze_every": {"freeze_every": 2},
    "Config.prepare_steps": {"prepare_steps": 2},
    "AutoDPConfig.on_peer_failure": {"autodp": SURVIVING},
}


def refused(rank, name, reader):
    with pytest.raises((ValueError, pt.PeerFailure)) as caught:
        train_on_two(rank, reader, CHANGING[name])
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHANGING)
def test_reading_ahead_is_refused_where_batches_are_divided_anew_within_a_pass(name):
    for text in run_ranks(refused, 2, name, "one ahead"):
        assert (
            "batches: expected a step with each batch before the next one is taken, as "
            f"{name}" in text
        )
        assert "got one with batch 0 after a later one was taken" in text


def test_reading_ahead_is_refused_where_plans_are_tried_out():
    with pytest.raises(ValueError, match=r"taken, as PlanConfig\.trial_steps"):
        train(0, one_ahead, plan=pt.PlanConfig(trial_steps=2))


@pytest.mark.distributed
def test_batches_that_all_ranks_leave_out_are_as_if_they_were_not_there():
    settings = {"only": (0, 3)}
    alone = train(0, iter, **settings)
    for last, told, seen in run_ranks(train_on_two, 2, "plain", settings):
        assert seen == alone[2]
        assert [each["optimizer_steps"] for each in told] == [2, 2]
        assert [each["samples"] for each in told] == [24, 24]
        for a, b in zip(last["weights"], alone[0]["weights"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_pass_whose_last_batch_is_left_out_is_recorded_when_its_loop_ends():
    engine = make_engine(freeze=schedule(0), dtype=torch.float64)
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(DATA, BATCH):
                if batch.index < NUM_BATCHES - 1:
                    engine.step(batch)
            assert [record.samples for record in engine.history.epochs] == [48]


@pytest.mark.parametrize(
    ("only", "got", "due"), [((1, 2), 1, 0), ((0, 2, 3), 2, 1), ((0, 1, 3), 3, 2)]
)
def test_a_batch_that_shares_a_step_cannot_be_left_out(only, got, due):
    with pytest.raises(ValueError) as caught:
        train(0, iter, only=only, accumulation_steps=2)
    assert str(caught.value) == (
        "Config.accumulation_steps: expected engine.step with each batch of an "
        f"optimizer step, got one with batch {got} where batch {due} is due"
    )


def test_all_batches_of_an_optimizer_step_can_be_left_out():
    _, told, seen = train(0, iter, only=(0, 1, 4), accumulation_steps=2)
    assert seen == [(epoch, index) for epoch in (0, 1) for index in (0, 1, 4)]
    assert [each["optimizer_steps"] for each in told] == [2, 2]
    assert [each["samples"] for each in told] == [26, 26]
