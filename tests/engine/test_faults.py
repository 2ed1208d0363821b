"""A dead peer ends all others with one clear error, standby ranks too."""

import fcntl
import os
import pty
import signal
import termios
import time

import pytest

import pipetransformer as pt
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import function_at, inject
from tests.support.ranks import Ranks
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed


def train_slowly(rank, folder, counts):
    """Train until a peer dies; report the error and what it says."""
    settings = config(
        plan=pt.PlanConfig(slot_memory_bytes=13_500, reshape="always"),
        checkpoint=pt.CheckpointConfig(directory=str(folder)),
    )
    engine = make_engine(freeze=schedule(*counts), config=settings)
    mark = folder / f"training-{rank}"
    try:
        with engine:
            for epoch in engine.epochs(1000):
                mark.write_text(str(epoch))
                for batch in engine.batches(ToySet(50, vouch=True), 12):
                    engine.step(batch)
                    time.sleep(0.02)
    except pt.PeerFailure as failure:
        return str(failure)
    return "finished"


def wait_for_epoch(folder, ranks, epoch, deadline_s=80):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        marks = [folder / f"training-{rank}" for rank in ranks]
        if all(m.exists() and int(m.read_text() or -1) >= epoch for m in marks):
            return
        time.sleep(0.05)
    raise AssertionError(f"ranks {ranks} did not reach epoch {epoch}")


# (freeze schedule, the epoch to wait for, the rank to kill)
CASES = {
    "standby": ((0,), 1, 2),
    "active": ((0, 6), 2, 3),
    "store host": ((0, 6), 2, 0),
    "store host with standbys": ((0,), 1, 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_peer_ends_all_others_with_peer_failure(case, kind, tmp_path):
    counts, epoch, victim = CASES[case]
    ranks = Ranks(train_slowly, 4, tmp_path, counts, timeout_s=100)
    survivors = [rank for rank in range(4) if rank != victim]
    try:
        wait_for_epoch(tmp_path, range(4), epoch)
        ranks.kill(victim, kind)
        outcomes = ranks.outcomes(survivors)
    finally:
        ranks.close()
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} ended with another error:\n{value}"
        assert value.startswith("peer failure"), value
    checkpoints = sorted(tmp_path.glob("step-*.pt"))
    assert checkpoints, "the survivors keep a checkpoint"


def test_sigterm_saves_a_checkpoint_and_ends_with_peer_failure(tmp_path):
    ranks = Ranks(train_slowly, 4, tmp_path, (0,))
    try:
        wait_for_epoch(tmp_path, range(4), 1)
        for rank in range(4):
            ranks.kill(rank, signal.SIGTERM)
        outcomes = ranks.outcomes()
    finally:
        ranks.close()
    assert all(ok and "peer failure" in value for ok, value in outcomes.values())
    assert list(tmp_path.glob("step-*.pt"))


def train_in_a_terminal(rank, folder):
    """Train as the first process of a terminal, which is closed in a step."""
    assert os.getsid(0) == os.getpid()  # so that it can have a terminal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    window, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal, stream)
    settings = config(checkpoint=pt.CheckpointConfig(directory=str(folder)))
    steps = 0
    try:
        with make_engine(freeze=pt.freeze.Never(), config=settings) as engine:
            for _ in engine.epochs(1000):
                for batch in engine.batches(ToySet(48), 12):
                    engine.step(batch)
                    steps += 1
                    if (rank, steps) == (1, 3):
                        os.close(window)
                    time.sleep(0.02)
    except pt.PeerFailure as failure:
        return failure.rank, failure.phase
    return "finished"


def test_a_closed_terminal_leaves_a_checkpoint_and_an_account(tmp_path):
    outcomes = Ranks(train_in_a_terminal, 2, tmp_path).join()
    assert outcomes == [(1, "SIGHUP")] * 2
    assert list(tmp_path.glob("step-*.pt"))


def fail_in_user_code(rank, folder):
    engine = make_engine(freeze=pt.freeze.Never(), config=config())
    try:
        with engine:
            for _ in engine.epochs(2):
                for number, batch in enumerate(engine.batches(ToySet(24), 12)):
                    if rank == 1 and number == 1:
                        raise KeyError("user's own mistake")
                    engine.step(batch)
    except pt.PeerFailure as failure:
        return str(failure)
    except KeyError as error:
        return repr(error)
    return "finished"


def test_an_exception_in_user_code_ends_the_others_and_is_named(tmp_path):
    texts = Ranks(fail_in_user_code, 2, tmp_path).join()
    assert texts[1] == repr(KeyError("user's own mistake"))
    assert texts[0].startswith("peer failure: rank 1")
    assert "user's own mistake" in texts[0]


def stop_early(rank, folder):
    engine = make_engine(
        freeze=schedule(0, 3), config=config(plan=pt.PlanConfig(max_replicas=1))
    )
    steps = 0
    with engine:
        for epoch in engine.epochs(10):
            for number, batch in enumerate(engine.batches(ToySet(48), 12)):
                engine.step(batch)
                steps += 1
                if number == 1:
                    break  # leaves the pass early
            loss = engine.evaluate(ToySet(8))["loss"]
            if epoch == 2:
                break  # leaves the epochs early
    return steps, loss


def test_break_and_early_stopping_end_every_rank_cleanly(tmp_path):
    results = Ranks(stop_early, 2, tmp_path).join()
    assert results[0][0] == 6 and results[1][0] == 0
    assert results[0][1] == results[1][1]


def fail_in_a_change(rank, folder):
    """Fail on rank 0 once its second plan is committed; its account comes late."""
    decide, fail = function_at("decide"), pt.autodp.ControlPlane.fail
    committed = []

    def decide_and_fail(*args, **kwargs):
        committed.append(decide(*args, **kwargs))
        if len(committed) == 2:
            raise KeyError("user's own mistake")
        return committed[-1]

    def fail_late(*args, **kwargs):
        time.sleep(0.2)
        fail(*args, **kwargs)

    if rank == 0:
        inject("decide", decide_and_fail)
        pt.autodp.ControlPlane.fail = fail_late
    settings = config(plan=pt.PlanConfig(slot_memory_bytes=13_500, reshape="always"))
    engine = make_engine(freeze=schedule(0, 6), config=settings)
    try:
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(ToySet(24, vouch=True), 12):
                    engine.step(batch)
    except pt.PeerFailure as failure:
        return failure.rank, failure.phase
    except KeyError as error:
        return repr(error)
    return "finished"


def test_a_rank_that_fails_in_a_change_of_plan_is_named_however_late_it_says_why(
    tmp_path,
):
    outcomes = Ranks(fail_in_a_change, 4, tmp_path).join()
    assert outcomes[0] == repr(KeyError("user's own mistake"))
    assert outcomes[1:] == [(0, "user code")] * 3
