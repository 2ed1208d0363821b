"""A run with a secret ends as if nobody had spoken to its ports."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed import TCPStore

from tests.engine.scenario import QUICK, config, is_active, make_engine, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import Ranks
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed

ROOT = pathlib.Path(__file__).parents[2]
EPOCHS, BATCH, RANKS = 5, 12, 4
MESSAGES = 10_000
FREEZE = (0, 2, 4, 6, 6)
PLAN = {"slot_memory_bytes": 27_000, "reshape": "always"}
SECRET = "what only the ranks of this run know"


def _settings(secret):
    import pipetransformer as pt

    return config(
        autodp=dataclasses.replace(QUICK, secret=secret),
        plan=pt.PlanConfig(**PLAN),
    )


def _train(rank, folder, secret, spaced):
    """Train; with `spaced` each epoch begins once its share of messages was sent."""
    torch.manual_seed(rank)
    engine = make_engine(freeze=schedule(*FREEZE), config=_settings(secret))
    train_set, test_set = ToySet(50, vouch=True), ToySet(21, seed=2, vouch=True)
    losses, shapes = [], []
    with engine:
        engine.prepare(train_set, BATCH)
        plane = run_of(engine).plane
        if rank == 0:
            told = {"run_id": plane.info.run_id, "port": os.environ["MASTER_PORT"]}
            _write(folder / "run", json.dumps(told))
        _write(folder / f"pid{rank}", str(os.getpid()))
        for epoch in engine.epochs(EPOCHS):
            if spaced:
                _wait_for(folder / "pace", (epoch + 1) * MESSAGES // EPOCHS)
            for item in engine.batches(train_set, BATCH):
                losses.append(float(engine.step(item)))
            losses.append(engine.evaluate(test_set)["loss"])
            shapes.append(engine.plan.num_stages if is_active(engine) else 0)
        refused = plane.num_refused
    weights = [p.detach().clone() for p in model_of(engine).parameters()]
    active = bool(shapes and shapes[-1])
    return {
        "losses": losses,
        "shapes": shapes,
        "refused": refused,
        "weights": weights if active else [],
    }


def _write(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _read(path, limit_s=80.0):
    end = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < end, f"{path.name}: expected it, got none"
        time.sleep(0.01)
    return path.read_text()


def _wait_for(path, count):
    end = time.monotonic() + 80.0
    while not path.exists() or int(path.read_text()) < count:
        assert time.monotonic() < end, f"adversary: expected {count} messages"
        time.sleep(0.01)


def _disturbed(folder, secret, *options, seed=7):
    """Train while the adversary speaks; return results by rank, and its counts."""
    with Ranks(_train, RANKS, folder, secret, True, timeout_s=100) as ranks:
        run = json.loads(_read(folder / "run"))
        pids = [_read(folder / f"pid{rank}") for rank in range(RANKS)]
        command = [sys.executable, "-m", "tests.autodp.adversary", *options]
        command += ["--port", run["port"], "--run-id", run["run_id"]]
        command += ["--messages", str(MESSAGES), "--seed", str(seed)]
        command += ["--pace", str(folder / "pace"), "--pids", *pids]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            results = ranks.join()
            counts = json.loads(process.communicate(timeout=60)[0])
        finally:
            process.kill()
            process.communicate()
    return results, counts


def test_ten_thousand_messages_of_somebody_without_the_secret_change_no_bit(
    tmp_path, capfd
):
    quiet, loud = tmp_path / "quiet", tmp_path / "loud"
    quiet.mkdir()
    loud.mkdir()
    with Ranks(_train, RANKS, quiet, SECRET, False) as ranks:
        expected = ranks.join()
    results, counts = _disturbed(loud, SECRET)
    sent = sum(count for kind, count in counts.items() if kind != "seconds")
    assert sent == MESSAGES
    kinds = ("random_key", "crafted", "compare", "replay", "store_port", "group_port")
    assert all(counts[kind] > 0 for kind in kinds), counts
    if hasattr(TCPStore, "list_keys"):
        assert counts["beat"] > 0, counts
        assert sum(result["refused"] for result in results) > 0, "none was sealed"
    assert len({shape for shape in results[0]["shapes"]}) > 1, "no change of plan"
    for result, other in zip(results, expected, strict=True):
        assert result["losses"] == other["losses"]
        assert result["shapes"] == other["shapes"]
        assert len(result["weights"]) == len(other["weights"])
        pairs = zip(result["weights"], other["weights"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    shown = "".join(capfd.readouterr())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def _loses_a_decision(rank, folder):
    """Train; somebody removes the decision of the second plan while it is made."""
    import pipetransformer as pt
    from pipetransformer.autodp import PeerFailure, PlanAgreement

    meet = PlanAgreement.meet

    def late(self):
        met = meet(self)
        if rank == 0 and self.epoch > 1:
            self._plane.delete(f"decision/{self.epoch}")
        return met

    PlanAgreement.meet = late
    saves = pt.CheckpointConfig(directory=folder, every_epochs=100)
    settings = dataclasses.replace(_settings(SECRET), checkpoint=saves)
    engine = make_engine(freeze=schedule(*FREEZE), config=settings)
    train_set = ToySet(50)
    with pytest.raises(PeerFailure) as caught, engine:
        for _ in engine.epochs(EPOCHS):
            for item in engine.batches(train_set, BATCH):
                engine.step(item)
    return caught.value.phase, caught.value.epoch


def test_a_run_whose_decision_is_removed_ends_with_an_emergency_checkpoint(tmp_path):
    from pipetransformer.checkpoint import format as checkpoint

    with Ranks(_loses_a_decision, RANKS, str(tmp_path)) as ranks:
        assert ranks.join() == [("store", 2)] * RANKS
    steps = -(-50 // BATCH)  # those of the first epoch
    assert [*tmp_path.iterdir()] == [checkpoint.path_of_step(tmp_path, steps)]
    checkpoint.read(checkpoint.path_of_step(tmp_path, steps))  # it is whole


def main(folder, secret, *options):
    """``python -m tests.engine.test_adversary FOLDER SECRET|- [OPTION ...]``: say how
    a run ends that is spoken to."""
    path = pathlib.Path(folder)
    path.mkdir()
    begin = time.monotonic()
    try:
        results, counts = _disturbed(path, None if secret == "-" else secret, *options)
    except AssertionError as error:
        print(str(error)[-1500:])
        sys.exit(1)
    print(f"{time.monotonic() - begin:.1f} s; {counts}")
    print("refused by rank:", [result["refused"] for result in results])
    print("last loss:", repr(results[0]["losses"][-1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
