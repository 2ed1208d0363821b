"""Settings of the engine on the pretended accelerator, each against the host."""

import dataclasses
import functools

import pytest
import torch

import pipetransformer as pt
from tests.engine import losses
from tests.engine.scenario import config, make_engine, schedule
from tests.support.device_ranks import MARKS, NODE, on_host, pretend
from tests.support.private import model_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost
from tests.support.toy import ToySet, accuracy

TIMEOUT_S = 110

pytestmark = MARKS


SETTINGS = {
    "accumulation": {"accumulation_steps": 3, "clip_grad_norm": 0.5},
    "within passes": {"freeze_every": 3, "prepare_steps": 1},
    "recomputation": {"pipe": {"checkpoint": "always"}},
    "codec": {"cache": {"codec": "bf16"}},
    "every hit checked": {"cache": {"debug": True}},
    "cache on disk": {"cache": {"budget_bytes": 4096, "disk": True}},
    "no cache": {"cache": {"enabled": False}},
    # Scaling by powers of two changes no bit; the pretended device casts nothing.
    "fp16": {"amp": "fp16"},
    "rows compared": {"check_loss": False},
    "one device": {"devices": NODE[1:2]},
}


def check_settings(_rank, libraries, places, name, folder):
    """Train with two stages; return losses, weights and what was reported."""
    fake = pretend(libraries)
    changes = {"devices": NODE[:2], **SETTINGS[name]}
    cache = dict(changes.pop("cache", {}))
    if cache.pop("disk", False):
        cache["disk_directory"] = folder
    pipe = pt.PipeConfig(num_slots=2, **changes.pop("pipe", {}))
    if places == "host":
        changes = {**changes, "devices": ("cpu",), "amp": None}
    else:
        changes["devices"] = (changes["devices"] * 2)[:2]
    settings = config(
        plan=pt.PlanConfig(num_stages=2, num_microbatches=2),
        pipe=pipe,
        cache=pt.CacheConfig(**cache),
        **changes,
    )
    counts = (0, 2, 3, 3)
    engine = make_engine(freeze=schedule(*counts), dtype=torch.float64, config=settings)
    data, found = ToySet(50, dtype=torch.float64), []
    test_set = ToySet(21, seed=2, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(data, 12):
                engine.step(batch)
            found.append(engine.evaluate(test_set, {"accuracy": accuracy})["loss"])
        hits = [epoch.cache_hits for epoch in engine.history.epochs]
    fake.synchronize()
    weights = [p.detach() for p in model_of(engine).parameters()]
    return found, weights, hits, fake.violations()


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_give_what_they_give_on_the_host(libraries, name, tmp_path):
    both = [
        run_ranks(
            check_settings,
            1,
            libraries,
            places,
            name,
            str(tmp_path),
            timeout_s=TIMEOUT_S,
        )[0]
        for places in ("device", "host")
    ]
    (mine, weights, hits, reported), (plain, expected, other_hits, _) = both
    assert reported == []
    assert hits == other_hits
    assert mine == pytest.approx(plain, rel=1e-9)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# -- real models ------------------------------------------------------------------


def train_text(rank, libraries, devices, num_stages, name, task):
    from tests.adapters import test_transformers as text

    fake = pretend(libraries)
    adapted = text.from_transformers(
        text.make_model(name, task, torch.float64), untie=True
    )
    samples = text.KeyedSamples(24, task)
    engine = pt.PipeTransformer(
        adapted,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        freeze=pt.freeze.Schedule([0, 2, 2]),
        config=config(
            devices=devices,
            plan=pt.PlanConfig(num_stages=num_stages, num_microbatches=2),
            eval_microbatch_rows=3,
        ),
    )
    found = []
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(samples, 8, collate_fn=text.pad):
                engine.step(batch)
            dev = text.Samples(7, task)
            found.append(engine.evaluate(dev, name="dev", collate_fn=text.pad)["loss"])
        hits = [epoch.cache_hits for epoch in engine.history.epochs]
    fake.synchronize()
    return found, hits, fake.violations()


@pytest.mark.parametrize(
    ("name", "task", "ranks", "stages"),
    [
        ("Bert", "sequence-classification", 4, 2),
        ("GPT2", "causal-lm", 2, 2),
        ("Llama", "causal-lm", 2, 1),
    ],
)
def test_models_of_transformers_train_on_devices(libraries, name, task, ranks, stages):
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    near = functools.partial(pytest.approx, rel=1e-6 if task == "causal-lm" else 1e-9)
    there = run_ranks(
        train_text, ranks, libraries, NODE[:ranks], stages, name, task, timeout_s=100
    )
    (here,) = run_ranks(
        train_text, 1, libraries, ("cpu",), 1, name, task, timeout_s=100
    )
    assert there[0][0] == near(here[0])
    assert there[0][1] == here[1] == [0, 0, 24]
    assert [result[2] for result in there] == [[]] * ranks


# -- losses of ranks --------------------------------------------------------------


def lose_there(rank, libraries, case, environment):
    fake = pretend(libraries)
    plain = losses.config
    losses.config = lambda **changes: dataclasses.replace(
        plain(**changes), devices=NODE
    )
    result = losses.lose(rank, case, environment)
    fake.synchronize()
    return {**on_host(result), "violations": fake.violations()}


@pytest.mark.parametrize(
    "case",
    ["lead in a step", "new member in the move", "lead in the move"],
)
def test_survivors_on_devices_finish_as_on_the_host(libraries, case):
    _, _, deaths = losses.CASES[case]
    key = losses.undisturbed_key(case)
    (plain,) = run_ranks(losses.train_alone, 1, [key], timeout_s=80)
    survivors = [rank for rank in range(4) if rank not in deaths]
    with (
        StoreHost() as host,
        Ranks(lose_there, 4, libraries, case, host.environment, timeout_s=105) as ranks,
    ):
        outcomes = ranks.outcomes(survivors)
    expected, last = plain[key]
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
        assert value["violations"] == []
        assert value["losses"] == pytest.approx(expected, rel=1e-9)
        if value["last"]:
            for name in ("weights", "tensors"):
                for a, b in zip(value["last"][name], last[name], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
