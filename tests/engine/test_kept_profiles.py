"""`PlanConfig.profile`: what one run has measured, another one does not measure."""

import copy
import dataclasses
import json
import stat
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import autocache, planner
from pipetransformer.autocache import CacheRates, TierRates
from pipetransformer.transformation import measured_inputs
from tests.engine.even_profile import even_profile
from tests.engine.scenario import config, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

RATES = TierRates(
    bytes_per_s=10**9, record_ns=1000, write_bytes_per_s=10**9, write_record_ns=1000
)


@pytest.fixture
def measured(monkeypatch):
    """Count what is measured: layers, and the cache."""
    counts = {"layers": 0, "rates": 0}

    def profile(*args, **options):
        counts["layers"] += 1
        return even_profile(*args, **options)

    def rates(*args, **options):
        counts["rates"] += 1
        return RATES

    monkeypatch.setattr(planner, "profile", profile)
    monkeypatch.setattr(autocache, "measure_rates", rates)
    return counts


def run(kept, *, samples=24, batch=8, model=None, **changes):
    """Train for a pass; return the plan and the profile in force."""
    plan = dataclasses.replace(changes.pop("plan", pt.PlanConfig()), profile=kept)
    usual = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    engine = pt.PipeTransformer(
        model or toy_model(),
        optimizer=changes.pop("optimizer", usual),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(0),
        units=None if model is not None else toy_units(),
        config=config(plan=plan, **changes),
    )
    with engine:
        for _ in engine.epochs(1):
            for item in engine.batches(ToySet(samples), batch):
                engine.step(item)
        return engine.plan, run_of(engine).inputs


def test_a_second_run_measures_nothing_and_plans_the_same(tmp_path, measured, caplog):
    folder = tmp_path / "profiles"
    plan, inputs = run(folder)
    assert measured == {"layers": 1, "rates": 1}
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with caplog.at_level("INFO"):
        again, found = run(folder)
    assert measured == {"layers": 1, "rates": 1}
    assert f"layers are not measured: {file} has their profile" in caplog.text
    assert (again.plan_hash, found.profile) == (plan.plan_hash, inputs.profile)
    assert found.rates == inputs.rates == CacheRates(RATES)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": toy_model(depth=3)},
        {"model": toy_model(width=12)},
        {"amp": "bf16"},
        {"plan": pt.PlanConfig(microbatch_samples=(1, 2))},
        {"pipe": pt.PipeConfig(threads_per_stage=3)},
        {"pipe": pt.PipeConfig(num_slots=2)},
    ],
)
def test_other_conditions_have_profiles_of_their_own(tmp_path, measured, changes):
    run(tmp_path)
    run(tmp_path, **changes)
    assert measured["layers"] == 2 and len(list(tmp_path.iterdir())) == 2
    run(tmp_path, **changes)
    assert measured["layers"] == 2


def test_other_cores_and_slots_as_devices_have_profiles_of_their_own(
    tmp_path, measured, monkeypatch
):
    slots = {"pipe": pt.PipeConfig(num_slots=2)}
    monkeypatch.delenv(measured_inputs.AS_DEVICES, raising=False)
    monkeypatch.setattr(measured_inputs, "usable_cores", lambda: 2.0)
    run(tmp_path, **slots)
    monkeypatch.setattr(measured_inputs, "usable_cores", lambda: 1.5)
    for _ in range(2):
        run(tmp_path, **slots)
    assert measured["layers"] == 2 and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setenv(measured_inputs.AS_DEVICES, "1")
    for cores in (1.5, 2.0):  # devices have cores of their own
        monkeypatch.setattr(measured_inputs, "usable_cores", lambda: cores)  # noqa: B023
        _, inputs = run(tmp_path, **slots)
        assert measured["layers"] == 3 and inputs.cluster.cores_permille == 0


def test_a_file_that_is_named_is_refused_with_other_cores(
    tmp_path, measured, monkeypatch
):
    monkeypatch.delenv(measured_inputs.AS_DEVICES, raising=False)
    monkeypatch.setattr(measured_inputs, "usable_cores", lambda: 2.0)
    run(tmp_path / "mine.json")
    monkeypatch.setattr(measured_inputs, "usable_cores", lambda: 1.0)
    with pytest.raises(ValueError, match=r"got cores 2\.0 where this run has 1\.0"):
        run(tmp_path / "mine.json")


def test_a_base_that_is_frozen_is_another_model(tmp_path, measured):
    run(tmp_path)
    model = toy_model()
    model[0].requires_grad_(False)
    run(tmp_path, model=model)
    assert measured["layers"] == 2


def test_another_set_measures_the_cache_alone(tmp_path, measured):
    run(tmp_path)
    run(tmp_path, samples=32)
    assert measured == {"layers": 1, "rates": 2}
    run(tmp_path, samples=32)
    assert measured == {"layers": 1, "rates": 2}
    run(tmp_path, cache=pt.CacheConfig(enabled=False))
    _, inputs = run(tmp_path)
    assert measured["layers"] == 1 and inputs.rates == CacheRates(RATES)


def test_a_run_with_copies_on_devices_measures_the_cache_anew(tmp_path, measured):
    run(tmp_path)
    for _ in range(2):
        run(tmp_path, cache=pt.CacheConfig(device_bytes=10**6))
        assert measured == {"layers": 1, "rates": 2}


def test_a_file_that_is_named_must_be_of_this_run(tmp_path, measured):
    file = tmp_path / "mine.json"
    run(file)
    run(file)
    assert measured["layers"] == 1 and list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match="of this run in .*, got threads . where this"):
        run(file, pipe=pt.PipeConfig(threads_per_stage=3))
    with pytest.raises(ValueError, match="got model '[0-9a-f]{16}' where this run has"):
        run(file, model=toy_model(depth=3))


def damaged(text, how):
    content = json.loads(text)
    if how == "torn":
        return text[: len(text) // 2]
    if how == "no UTF-8":
        return text.replace('"version"', '"\udcff"')
    if how == "another version":
        content["version"] = 1
    elif how == "a list":
        content = [content]
    elif how == "no profile":
        del content["profile"]
    elif how == "negative times":
        content["profile"]["layers"][0]["forward_ns"] = [-1]
    elif how == "rates of nothing":
        content["rates"]["values"] = {"bytes_per_s": 0}
    return json.dumps(content)


@pytest.mark.parametrize(
    "how",
    [
        "torn",
        "no UTF-8",
        "another version",
        "a list",
        "no profile",
        "negative times",
        "rates of nothing",
    ],
)
def test_a_damaged_file_is_measured_anew_or_refused(tmp_path, measured, caplog, how):
    run(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damaged(file.read_text(), how).encode(errors="surrogateescape"))
    run(tmp_path)
    assert "is no profile of this run, measured anew" in caplog.text
    assert measured["layers"] == 2
    run(tmp_path)
    assert measured["layers"] == 2
    file.write_bytes(damaged(file.read_text(), how).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="PlanConfig.profile: expected a profile"):
        run(file)


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, measured, caplog):
    (tmp_path / "file").write_text("")
    run(tmp_path / "file" / "folder")
    assert "the profile is not kept" in caplog.text


def on_rank(_rank, folder):
    planner.profile = even_profile
    plan, inputs = run(folder)
    return inputs.profile.to_json(), plan and plan.plan_hash


@pytest.mark.distributed
def test_all_ranks_plan_with_what_the_lead_found(tmp_path):
    first = run_ranks(on_rank, 2, tmp_path)
    second = run_ranks(on_rank, 2, tmp_path)
    assert {profile for profile, _ in first + second} == {first[0][0]}
    assert first == second


@pytest.mark.parametrize("value", ["", 3])
def test_a_wrong_name_is_refused(value):
    with pytest.raises((ValueError, TypeError), match="PlanConfig.profile"):
        pt.PlanConfig(profile=value)


class Attends(nn.Linear):
    """Names its way to compute as models of transformers do."""

    def __init__(self, implementation):
        super().__init__(8, 8)
        self.config = SimpleNamespace(_attn_implementation=implementation)


class Repeats(nn.Linear):
    """Has settings that its text does not tell."""

    def __init__(self, times, sizes=(2, 2)):
        super().__init__(8, 8)
        self.times, self.sizes = times, list(sizes)

    def forward(self, x):
        for _ in range(self.times):
            x = super().forward(x)
        return x


@pytest.mark.parametrize(
    "changed",
    [
        lambda: [nn.Linear(4, 8), nn.Dropout(0.1), Attends("sdpa"), nn.Linear(8, 3)],
        lambda: [nn.Linear(4, 8), nn.ReLU(), Attends("eager"), nn.Linear(8, 3)],
        lambda: [
            nn.Linear(4, 8),
            nn.ReLU(),
            Attends("sdpa"),
            nn.Linear(8, 3),
            nn.ReLU(),
        ],
    ],
)
def test_layers_of_other_settings_have_profiles_of_their_own(
    tmp_path, measured, changed
):
    same = [nn.Linear(4, 8), nn.ReLU(), Attends("sdpa"), nn.Linear(8, 3)]
    run(tmp_path, model=nn.Sequential(*same))
    run(tmp_path, model=nn.Sequential(*copy.deepcopy(same)))
    assert measured["layers"] == 1
    run(tmp_path, model=nn.Sequential(*changed()))
    assert measured["layers"] == 2


@pytest.mark.parametrize("changed", [(3, (2, 2)), (2, (2, 4))])
def test_so_have_those_of_other_attributes(tmp_path, measured, changed):
    def model(*settings):
        return nn.Sequential(nn.Linear(4, 8), Repeats(*settings), nn.Linear(8, 3))

    run(tmp_path, model=model(2, (2, 2)))
    run(tmp_path, model=model(2, (2, 2)))
    assert measured["layers"] == 1
    run(tmp_path, model=model(*changed))
    assert measured["layers"] == 2


@pytest.mark.parametrize(
    ("options", "is_other"),
    [({"momentum": 0.8}, False), ({"lr": 0.2}, False), ({"nesterov": True}, True)],
)
def test_optimizers_with_other_options_on_have_profiles_of_their_own(
    tmp_path, measured, options, is_other
):
    usual = {"lr": 0.1, "momentum": 0.9}
    for given in (usual, {**usual, **options}):
        run(tmp_path, optimizer=lambda p, o=given: torch.optim.SGD(p, **o))
    assert measured["layers"] == 1 + is_other


def test_groups_and_classes_of_optimizers_are_told_apart(tmp_path, measured):
    class SGD(torch.optim.SGD):
        """Of the same name."""

    def of(kind, first):
        def make(params):
            params = list(params)
            groups = [params[:first], params[first:]]
            return kind([{"params": group} for group in groups], lr=0.1)

        return make

    for kind, first in [(torch.optim.SGD, 2), (torch.optim.SGD, 4), (SGD, 4)]:
        run(tmp_path, optimizer=of(kind, first))
    assert measured["layers"] == 3


def test_where_a_model_comes_from_and_what_it_holds_is_no_setting(tmp_path, measured):
    for place in ("job1", "/data/job2"):
        model = toy_model()
        model[0].name_or_path = place
        model[1].held = held = []
        held.append(held)
        model[0].cache_of = f"/tmp/{place}"
        run(tmp_path, model=model)
    assert measured["layers"] == 1
