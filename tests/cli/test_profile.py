"""``pipetransformer profile``: what it imports, prints and writes."""

import io
import json
import stat
import sys

import pytest
import torch

from pipetransformer.cli.main import main
from pipetransformer.cli.profile import _table
from pipetransformer.planner import Profile
from tests.planner.instances import cluster, layer, profile

MODELS = """
import torch
from torch import nn

from pipetransformer.pipe.skip import pop, skippable, stash

print("imported")
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
rows = torch.zeros(16, 4)
pair = model, rows
linear = nn.Linear(2, 2)
number = 3
triple = (model, rows, rows)
norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
one_row = torch.zeros(1, 4)


@skippable(stash="skip")
class Keep(nn.Linear):
    def forward(self, x):
        yield stash("skip", x)
        return super().forward(x)


@skippable(pop="skip")
class Join(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip


unet = nn.Sequential(Keep(4, 4), nn.Linear(4, 4), Join(), nn.Linear(4, 2)), rows


def build():
    return nn.Sequential(*model)


def sample():
    return rows


def pair_with_threads():
    return nn.Sequential(Threads()), rows


class Threads(nn.Module):
    seen = []

    def forward(self, x):
        self.seen.append(torch.get_num_threads())
        return x


def needs_width(width):
    return model


def fails():
    raise RuntimeError("no\\nmodel")


class Holder:
    inner = model


def leaves():
    raise SystemExit(0)


class Refuses(nn.Linear):
    error = ValueError("no such rows")

    def forward(self, x):
        raise self.error


class Leaves(Refuses):
    error = SystemExit(0)


refuses = nn.Sequential(Refuses(4, 4)), rows
leaving = nn.Sequential(Leaves(4, 4)), rows


wrong_rows = torch.zeros(16, 5)
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("1 / 0\n")
    (tmp_path / "leaving_models.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    sys.modules.pop("some_models", None)


FAST = ["--repeats", "1", "--microbatch-samples", "1,4"]


@pytest.mark.parametrize(
    "target",
    [
        ["some_models:pair"],
        ["some_models:model", "--sample", "some_models:rows"],
        ["some_models:build", "--sample", "some_models:sample"],
        ["some_models:Holder.inner", "--sample", "some_models:rows"],
    ],
)
def test_models_and_samples_are_found_by_name(capsys, target):
    assert main(["profile", *target, *FAST, "--json"]) == 0
    captured = capsys.readouterr()
    profile = Profile.from_json(captured.out)  # what the module prints is elsewhere
    assert profile.microbatch_samples == (1, 4)
    assert [x.name for x in profile.layers] == ["0.Linear", "1.ReLU", "2.Linear"]
    assert profile.name == target[0]
    assert "imported" in captured.err and "3 layers measured in" in captured.err


def test_a_models_name_needs_no_locale_of_its_letters(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    command = ["profile", "some_models:pair", *FAST, "--name", "日本"]
    assert main(command) == 0
    assert stream.buffer.getvalue().startswith(rb"\u65e5\u672c: 3 layers measured")


def test_files_of_the_folder_take_the_place_of_no_installed_module(
    capsys, models, monkeypatch
):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (models / "colorsys.py").write_text("1 / 0\n")
    (models / "importing_models.py").write_text(
        "import colorsys\nfrom some_models import pair\n"
    )
    assert main(["profile", "importing_models:pair", *FAST, "--json"]) == 0
    assert Profile.from_json(capsys.readouterr().out).layers
    sys.modules.pop("importing_models")


def test_model_with_skips_is_profiled_and_planned(capsys, models):
    path, machines = models / "unet.json", models / "cluster.json"
    machines.write_text(cluster(4).to_json())
    measured = ["profile", "some_models:unet", *FAST, "--output", str(path)]
    assert main(measured) == 0
    assert Profile.from_json(path.read_text()).skips == ((0, 2),)
    costs = ["--profile", str(path), "--cluster", str(machines)]
    wanted = ["plan", *costs, "--global-batch", "4"]
    capsys.readouterr()
    assert main([*wanted, "--num-stages", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cuts"] == [0, 1, 2, 3, 4]
    plan = str(models / "plan.json")
    assert main([*wanted, "--frozen", "3", "--output", plan]) == 0
    assert main(["explain", plan, *costs]) == 0
    assert main([*wanted, "--frozen", "2"]) == 2
    text = "boundary 2: expected no skip past it, got one from layer 0 to layer 2"
    assert text in capsys.readouterr().err


def test_the_table_shows_each_layer_size_and_how_long_it_took(capsys):
    assert main(["profile", "some_models:pair", *FAST, "--name", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine: 3 layers measured in ")
    assert lines[0].endswith(" s with 1 repeats")
    heading = next(line for line in lines if "layer" in line and "rows" in line)
    assert heading.split() == [
        "layer",
        "1",
        "row",
        "4",
        "rows",
        "weights",
        "saved/row",
        "out/row",
    ]
    row = next(line for line in lines if line.strip().startswith("0.Linear")).split()
    assert row[3:] == ["160", "16", "32"]
    assert all(len(triple.split("/")) == 3 for triple in row[1:3])


def test_bytes_that_do_not_grow_with_rows_have_a_column_where_there_are_any():
    fixed = dict(activation_bytes_per_microbatch=1024, shared_activation_bytes=2048)
    table = _table(profile([layer(0, **fixed), layer(1)]))
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["saved/call"] == ["3K", "0"]
    plain = _table(profile([layer(0), layer(1)]))
    assert "saved/call" not in [str(column.header) for column in plain.columns]


def test_long_times_are_shown_in_milliseconds():
    slow = layer(0, times=(10_500_000, 123_456_789, 20_000))
    table = _table(profile([slow, layer(1, parameters=3 * 2**30)]))
    assert str(table.title).startswith("ms of")
    cells = [list(column.cells) for column in table.columns]
    assert cells[1] == ["10/123/0.02", "1e-05/1e-05/1e-05"]
    assert cells[2] == ["0", "3G"]


def test_the_profile_is_written_for_its_owner_alone(capsys, models):
    path = models / "profile.json"
    arguments = ["profile", "some_models:pair", *FAST, "--output", str(path)]
    assert main(arguments) == 0
    assert f"written to {path}" in capsys.readouterr().out
    assert len(Profile.from_json(path.read_text()).layers) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main([*arguments, "--json"]) == 0
    assert Profile.from_json(capsys.readouterr().out).to_json() == (
        path.read_text().strip()
    )


def test_output_dash_is_the_profile_alone(capsys):
    assert main(["profile", "some_models:pair", *FAST, "--output", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


def test_threads_are_set_for_measuring_alone(capsys):
    before = torch.get_num_threads()
    target = ["profile", "some_models:pair_with_threads", *FAST, "--json"]
    assert main([*target, "--threads", "2"]) == 0
    assert set(sys.modules["some_models"].Threads.seen) == {2}
    assert torch.get_num_threads() == before
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["some_models"], "some_models: expected MODULE:ATTR, such as"),
        (["some_models:"], "some_models:: expected MODULE:ATTR"),
        (["some_models:a-b"], "some_models:a-b: expected MODULE:ATTR"),
        (["nowhere:x"], "nowhere:x: expected code that runs, got ModuleNotFoundError"),
        (["broken_models:x"], "got ZeroDivisionError: division by zero"),
        (["some_models:x"], "got AttributeError: module 'some_models' has no"),
        (["some_models:fails"], "got RuntimeError: no model"),
        (["some_models:needs_width"], "got TypeError: needs_width() missing 1"),
        (["leaving_models:x"], "leaving_models:x: expected code that runs, got System"),
        (
            ["some_models:leaves"],
            "some_models:leaves: expected code that runs, got Sys",
        ),
        (
            ["some_models:leaving"],
            "some_models:leaving on its sample: expected code that runs, got SystemE",
        ),
        (
            ["some_models:refuses"],
            "some_models:refuses on its sample: expected code that runs, got ValueErr"
            "or: no such rows",
        ),
        (
            ["some_models:pair", "--threads", "2147483648"],
            "--threads: expected an integer from 1 to 1024, got '2147483648'",
        ),
        (["some_models:linear"], "expected an nn.Sequential, got Linear"),
        (["some_models:number"], "expected an nn.Sequential, got int"),
        (["some_models:triple"], "a pair of model and sample, got 3 values"),
        (["some_models:model"], "or --sample MODULE:ATTR, got a model alone"),
        (
            ["some_models:model", "--sample", "some_models:number"],
            "some_models:number sample: expected a tensor, tuple, list or dict, got",
        ),
        (
            ["some_models:model", "--sample", "some_models:wrong_rows"],
            "some_models:model on its sample: expected code that runs, got RuntimeErr",
        ),
        (
            ["some_models:norm", "--sample", "some_models:one_row"],
            "error: sample: expected at least 2 rows, got 1",
        ),
        (
            ["some_models:pair", "--microbatch-samples", "4,1"],
            "error: microbatch_samples: expected increasing sizes from 1, got [4, 1]",
        ),
        (
            ["some_models:pair", "--microbatch-samples", "1,x"],
            "--microbatch-samples: expected an integer from 1 to 2**62, got 'x'",
        ),
        (["some_models:pair", "--repeats", "0"], "--repeats: expected an integer"),
        (
            ["some_models:pair", *FAST, "--output", "no/such/folder/p.json"],
            "No such file or directory",
        ),
    ],
)
def test_bad_input_is_one_error_line(capsys, arguments, text):
    assert main(["profile", *arguments, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and text in errors[0]
    assert "Traceback" not in captured.err


def test_the_traceback_is_shown_on_request(capsys):
    assert main(["profile", "some_models:fails", "--json", "--traceback"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "in fails" in shown
    assert shown.splitlines()[-1].startswith("error: some_models:fails")


def test_the_demos_model_can_be_profiled(capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    target = ["examples.vit_digits:build_vit", "--sample", "examples.vit_digits:sample"]
    assert main(["profile", *target, *FAST, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 14
