"""The page of a run: complete, safe to open, and drawn without an error."""

import dataclasses
import json
import re
import shutil
import stat
import subprocess
import types

import pytest

import pipetransformer as pt
from pipetransformer import planner
from pipetransformer.cli.main import main
from pipetransformer.loop import run_files
from pipetransformer.report import Saved, page, write_page
from tests.engine.even_profile import even_profile
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.toy import ToySet, accuracy

CHARTS = ["throughput", "step", "loss", "metric-accuracy", "rate", "frozen", "hits"]
CHARTS += ["cache", "memory", "phases"]
SECTIONS = ("timeline", "changes", "decisions", "events")
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that froze layers, changed its plan, cached and evaluated."""
    place = tmp_path_factory.mktemp("runs") / "one"
    patch = pytest.MonkeyPatch()
    patch.setattr(planner, "profile", even_profile)  # plans of any machine
    settings = config(
        report=str(place),
        plan=pt.PlanConfig(slot_memory_bytes=34_000),
        pipe=pt.PipeConfig(num_slots=4),
    )
    with make_engine(freeze=schedule(0, 2, 4), config=settings) as engine:
        for _ in engine.epochs(4):
            for batch in engine.batches(ToySet(50, vouch=True), 12):
                engine.step(batch)
            engine.evaluate(ToySet(21, seed=2), {"accuracy": accuracy})
    patch.undo()
    return place


@pytest.fixture(scope="module")
def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def data_of(text):
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])["runs"]


def test_a_run_writes_its_page_for_its_owner_alone(folder):
    for name in ("report.html", "summary.json"):
        mode = stat.S_IMODE((folder / name).stat().st_mode)
        assert mode == 0o600
    (run,) = data_of((folder / "report.html").read_text())
    assert run["name"] == "one" and len(run["epochs"]) == 4


def test_the_page_needs_nothing_from_elsewhere(folder):
    text = (folder / "report.html").read_text()
    addresses = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a format"
    assert "src=" not in text and "@import" not in text and "url(" not in text


def test_its_data_are_those_of_the_run(folder, summary):
    (run,) = data_of((folder / "report.html").read_text())
    epochs = summary["epochs"]
    assert [e["loss"] for e in run["epochs"]] == pytest.approx(
        [e["train_loss"] for e in epochs], rel=1e-5
    )
    assert [e["units"] for e in run["epochs"]] == [0, 2, 4, 4]
    assert run["epochs"][-1]["hit_share"] == 100
    assert run["epochs"][0]["metrics"].keys() == {"loss", "accuracy"}
    assert run["epochs"][0]["learning_rate"] > run["epochs"][3]["learning_rate"]
    for epoch in run["epochs"]:
        assert 0 < epoch["memory_mb"] <= epoch["limit_mb"]
    assert run["layers"] == 8 and run["slots"] == 4, "the most that a plan used"
    times = [t for part in run["segments"] for t in (part["t0"], part["t1"])]
    assert times == sorted(times) and times[-1] <= run["total_s"]
    assert [p["step"] for p in run["segments"]] == [0, 5, 10, 15]
    for part in run["segments"]:
        assert part["cuts"][0] == part["boundary"] and part["cuts"][-1] == 8
        assert len(part["cuts"]) == part["K"] + 1
    assert len(run["changes"]) == len(summary["transformations"]) >= 2
    for change in run["changes"]:
        assert change["t"] in [p["t0"] for p in run["segments"]]
        assert change["reason"] and change["pause_ms"] > 0
    told = [(d["point"], d["units"]) for d in run["decisions"]]
    assert told == [(0, 0), (1, 2), (2, 4), (3, 4), (4, 4)], "one for after the last"
    assert sum(s for _, s in run["phases"]) == pytest.approx(
        summary["total_seconds"], rel=1e-3
    )


def test_what_freezing_saved_stands_with_the_decisions(summary):
    saved = Saved(1.5, 0.25, 0.02, 0.0085).to_json()
    (run,) = data_of(page({"a": {**summary, "freezing": saved}}))
    assert run["saved"].startswith("so far freezing has ")
    (other,) = data_of(page({"a": {**summary, "freezing": None}}))
    assert other["saved"] is None


def test_texts_of_a_run_cannot_leave_their_place(summary):
    evil = "</script><script>alert(1)</script><!--"
    summary = json.loads(json.dumps(summary))
    summary["transformations"][0]["reason"] = evil
    text = page({evil: summary})
    assert evil not in text and "<script>alert" not in text
    (run,) = data_of(text)
    assert run["name"] == run["changes"][0]["reason"] == evil


def test_numbers_that_are_none_are_left_out(summary):
    summary = json.loads(json.dumps(summary))
    summary["epochs"][0]["train_loss"] = float("nan")
    summary["epochs"][1]["metrics"]["accuracy"] = float("inf")
    (run,) = data_of(page({"a": summary}))
    assert run["epochs"][0]["loss"] is None
    assert run["epochs"][1]["metrics"]["accuracy"] is None


def test_summaries_of_before_are_shown_too(summary):
    old = json.loads(json.dumps(summary))
    del old["decisions"]
    for epoch in old["epochs"]:
        del epoch["pace"]
        for part in epoch["segments"]:
            for name in ("cuts", "began_seconds", "learning_rate", "bytes_per_stage"):
                del part[name]
    (run,) = data_of(page({"old": old}))
    assert run["layers"] == 6, "as far as the boundary tells"
    times = [t for part in run["segments"] for t in (part["t0"], part["t1"])]
    assert times == sorted(times)


def test_changes_of_a_resumed_run_are_where_they_were(summary):
    (whole,) = data_of(page({"a": summary}))
    later = json.loads(json.dumps(summary))
    for change in (later["first_plan"], *later["transformations"]):
        change["step"] += 1000
    (resumed,) = data_of(page({"a": later}))
    assert [c["t"] for c in resumed["changes"]] == [c["t"] for c in whole["changes"]]
    assert [p["step"] for p in resumed["segments"]] == [1000, 1005, 1010, 1015]
    (other,) = data_of(page({"a": {**summary, "first_plan": None}}))
    assert other["segments"] == whole["segments"]


def test_a_change_after_the_last_whole_pass_is_behind_it(summary):
    broken = json.loads(json.dumps(summary))
    change = dict(broken["transformations"][-1], step=10**6)
    broken["transformations"].append(change)
    (found,) = data_of(page({"a": broken}))
    assert found["changes"][-1]["t"] == found["segments"][-1]["t1"]


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "fast"},
        {"seconds": 10**400},
        {"seconds": "x" * 5000 + "\x1b"},
        {"segments": [{"num_stages": float("nan")}]},
        {"segments": [{"boundary": float("nan")}]},
    ],
    ids=["a text", "a huge number", "a long text", "no number", "no boundary"],
)
def test_values_of_another_kind_are_refused_in_one_short_line(summary, change):
    summary = json.loads(json.dumps(summary))
    epoch = summary["epochs"][1]
    if "segments" in change:
        (part,) = change["segments"]
        change = {"segments": [{**epoch["segments"][0], **part}]}
    summary["epochs"][1] = {**epoch, **change}
    with pytest.raises(
        ValueError, match="summary of x: expected what report.w"
    ) as told:
        page({"x": summary})
    assert len(str(told.value)) < 400 and str(told.value).isprintable()


@pytest.mark.parametrize("value", [{}, {"epochs": [{}]}, {"epochs": 3}])
def test_what_is_no_summary_is_refused(value):
    with pytest.raises(ValueError, match="summary of x: expected what report.write"):
        page({"x": value})
    with pytest.raises(ValueError, match="runs: expected at least one, got none"):
        page({})


def test_a_report_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    settings = config(report=str(tmp_path / "file"))
    with make_engine(freeze=schedule(0), config=settings) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    assert "the run's report is not written" in caplog.text
    with pytest.raises(ValueError, match="Config.report: expected a folder's name"):
        pt.Config(report="")


def test_the_command_writes_one_run_or_compares_several(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder)]) == 0
    assert len(data_of((tmp_path / "report.html").read_text())) == 1
    shutil.copytree(folder, tmp_path / "x" / "one")
    both = [str(folder / "summary.json"), str(tmp_path / "x" / "one")]
    assert main(["report", *both, "--output", "both.html"]) == 0
    names = [run["name"] for run in data_of((tmp_path / "both.html").read_text())]
    assert len(set(names)) == 2 and all(name.endswith("one") for name in names)
    assert main(["report", str(folder), str(folder)]) == 2
    (tmp_path / "bad.json").write_text("[]")
    assert main(["report", "bad.json"]) == 2
    assert main(["report", "missing"]) == 2
    assert "error: " in capsys.readouterr().err


def test_the_command_prints_the_page_or_json(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), "--json", "--output", "a/b.html"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": 1, "page": "a/b.html"}
    assert main(["report", str(folder), "--output", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == (tmp_path / "a" / "b.html").read_text().strip()
    assert not (tmp_path / "-").exists()
    for wrong in (["--output", "-", "--json"], ["--output", ""]):
        assert main(["report", str(folder), *wrong]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert "--output: expected a file" in captured.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", "fast"),
        ("seconds", 10**400),
        ("epoch", float("nan")),
        ("elapsed_seconds", "late"),
        ("samples", 10**400),
        ("segments", None),
    ],
    ids=["a text", "a huge number", "no number", "a later text", "many", "nothing"],
)
def test_the_command_names_the_file_of_what_is_no_summary(
    folder, summary, tmp_path, capsys, name, value
):
    summary = json.loads(json.dumps(summary))
    summary["epochs"][1][name] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(summary))
    page = tmp_path / "page.html"
    assert main(["report", str(folder), str(path), "--output", str(page)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and not page.exists()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {path}: ") and "expected" in line


def large(summary, changes=1000):
    """A run of 10,000 steps whose plan changes every ten."""
    one = json.loads(json.dumps(summary))
    epoch, change = one["epochs"][0], one["transformations"][0]
    part = epoch["segments"][0]
    one["epochs"], one["transformations"] = [], []
    for number in range(100):
        made = json.loads(json.dumps(epoch))
        made["epoch"], made["elapsed_seconds"] = number, 10.0 * (number + 1)
        made["segments"] = []
        for nth in range(changes // 100):
            began = 10.0 * number + nth
            shape = {"num_stages": 1 + nth % 4, "num_replicas": 4 // (1 + nth % 4)}
            made["segments"].append(
                {**part, "began_seconds": began, "seconds": 0.9, "optimizer_steps": 10}
                | shape
                | {"cuts": [0, *range(1, 1 + nth % 4), 8]}
            )
            step = 1000 // 10 * number + 10 * nth
            one["transformations"].append({**change, "epoch": number, "step": step})
        one["epochs"].append(made)
    one["total_seconds"] = 1000.0
    return one


def test_a_large_run_is_a_small_page(summary):
    assert len(page({"large": large(summary)})) < 5_000_000


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")

    def open_page(path, width=1200):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
        command += [f"--window-size={width},2400", "--enable-logging=stderr"]
        command += ["--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert told == [], "the page reports an error"
        return done.stdout

    return open_page


def figure(dom, name):
    found = re.search(rf'<(figure|div) class="card" id="{name}">(.*?)</\1>', dom, re.S)
    return found[2] if found else None


def test_every_chart_has_its_data(folder, browser):
    dom = browser(folder / "report.html")
    assert re.search(r'<body data-ready="\d+">', dom)
    for name in CHARTS:
        drawn = figure(dom, name)
        assert drawn is not None, name
        assert "<svg" in drawn and "nothing to show" not in drawn, name
        assert re.search(r'aria-label="[^"]{10,}"', drawn), "said in words, too"
    for name in SECTIONS:
        assert figure(dom, name) is not None or f'id="{name}"' in dom, name
    assert dom.count('class="pipe"') >= 1, "the plan at the time of the slider"
    assert 'type="range"' in dom and "Play" in dom


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_width_breaks_it(width, folder, browser):
    assert "data-ready" in browser(folder / "report.html", width)


def test_a_large_run_and_a_comparison_are_drawn(folder, summary, tmp_path, browser):
    write_page({"large": large(summary)}, tmp_path / "large.html")
    dom = browser(tmp_path / "large.html")
    assert "data-ready" in dom and dom.count("<td") > 8000
    write_page({"a": summary, "b": summary}, tmp_path / "both.html")
    dom = browser(tmp_path / "both.html")
    assert dom.count('class="card" id="timeline"') == 2 and 'id="compared"' in dom


def resumed(folder, epochs, *, report="report", error=None):
    wanted = pt.CheckpointConfig(directory=folder / "checkpoints", resume=True)
    settings = config(report=str(folder / report), checkpoint=wanted)
    with make_engine(freeze=schedule(0), depth=1, config=settings) as engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(8), 8):
                if error is not None:
                    raise error
                engine.step(batch)


def short_passes(folder, epochs, *, report="report", fails_in=None):
    """Run short passes; in one of them the script raises."""
    settings = config(report=str(folder / report))
    with make_engine(freeze=schedule(0), depth=1, config=settings) as engine:
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(ToySet(8), 8):
                if epoch == fails_in:
                    raise RuntimeError("no\nroom " + "x" * 1000)
                engine.step(batch)
    return engine


def test_between_short_passes_the_report_waits_and_at_the_end_it_is_whole(
    tmp_path, monkeypatch
):
    ticks = iter(range(1000))  # whoever looks at the clock finds it a second later
    clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(run_files, "time", clock)
    told, write = [], run_files.write_summary

    def noted(history, path):
        told.append((len(history.epochs), history.ended is None))
        write(history, path)

    monkeypatch.setattr(run_files, "write_summary", noted)
    short_passes(tmp_path, 15)
    # At 0 s, done at 1 s; of the looks at 2 s to 11 s the last is due, done at 12 s.
    assert told == [(1, True), (11, True), (15, False)]
    assert passes_in(tmp_path / "report" / "summary.json") == list(range(15))


def test_the_report_says_whether_the_run_ended_well(tmp_path, monkeypatch):
    told, write = [], run_files.write_summary

    def noted(history, path):
        write(history, path)
        told.append(json.loads(path.read_text())["ended"])

    monkeypatch.setattr(run_files, "write_summary", noted)
    engine = short_passes(tmp_path, 1)
    assert told == [None, "well"] and engine.history.ended.is_good
    (run,) = data_of((tmp_path / "report" / "report.html").read_text())
    assert run["state"] == "ended well"


@pytest.mark.parametrize("fails_in", [0, 1])
def test_the_report_says_which_error_ended_the_run(tmp_path, fails_in):
    with pytest.raises(RuntimeError, match="no\nroom"):
        short_passes(tmp_path, 2, fails_in=fails_in)
    place = tmp_path / "report"
    ended = json.loads((place / "summary.json").read_text())["ended"]
    assert ended["error"] == "RuntimeError"
    assert ended["text"].startswith("no room xxx") and len(ended["text"]) == 500
    assert passes_in(place / "summary.json") == list(range(fails_in))
    (run,) = data_of((place / "report.html").read_text())
    assert run["state"].startswith("ended with RuntimeError: no room xxx")


def test_an_error_of_the_last_step_is_the_end_of_the_run(tmp_path, monkeypatch):
    settings = config(report=str(tmp_path))
    engine = make_engine(freeze=schedule(0), depth=1, config=settings)
    with pytest.raises(FloatingPointError, match="late"), engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(8), 8):
                engine.step(batch)

        def tell():
            raise FloatingPointError("late")

        monkeypatch.setattr(run_of(engine), "tell_step", tell)
    ended = json.loads((tmp_path / "summary.json").read_text())["ended"]
    assert ended == {"error": "FloatingPointError", "text": "late"}


def test_the_state_of_a_run_is_shown_and_unknown_in_older_summaries(summary):
    def state(**changes):
        (run,) = data_of(page({"a": {**summary, **changes}}))
        return run["state"]

    old = {name: value for name, value in summary.items() if name != "ended"}
    assert data_of(page({"a": old}))[0]["state"] is None
    assert state(ended=None) == "running" and state(ended="well") == "ended well"
    error = {"error": "OSError", "text": "disk full"}
    assert state(ended=error) == "ended with OSError: disk full"
    with pytest.raises(ValueError, match="summary of a: expected what report.write"):
        state(ended="badly")


def test_a_run_that_died_in_its_first_pass_is_drawn_with_its_error(tmp_path, browser):
    with pytest.raises(RuntimeError):
        short_passes(tmp_path, 2, fails_in=0)
    dom = browser(tmp_path / "report" / "report.html")
    drawn = figure(dom, "timeline")
    assert "no pass has ended; the run ended with RuntimeError: no room" in drawn
    assert '<div class="bad"><dt>state</dt><dd>ended with RuntimeError' in dom


def test_a_run_has_one_colour_in_all_charts_of_a_comparison(summary, tmp_path, browser):
    bare = json.loads(json.dumps(summary))
    for epoch in bare["epochs"]:
        epoch["metrics"] = {}  # a chart in which the first run has no points
    write_page({"bare": bare, "other": summary}, tmp_path / "both.html")
    dom = browser(tmp_path / "both.html")
    keys = re.findall(r'<i style="background:([^"]+)"></i>(bare|other)<', dom)
    colours = {name: {c for c, n in keys if n == name} for name in ("bare", "other")}
    assert len(keys) > 6 and all(len(found) == 1 for found in colours.values())
    assert colours["bare"] != colours["other"]


def test_the_columns_of_a_comparison_are_named_as_the_facts_are(
    summary, tmp_path, browser
):
    write_page({"a": summary, "b": summary}, tmp_path / "both.html")
    dom = browser(tmp_path / "both.html")
    head = re.search(r'id="compared">.*?<thead>(.*?)</thead>', dom, re.S)[1]
    named = re.findall(r"<th[^>]*>(.*?)</th>", head)
    assert len(set(named)) == len(named)
    assert {"training loss", "loss, evaluated", "accuracy, evaluated"} < set(named)
    assert named[-1] == "state"


def passes_in(path):
    return [each["epoch"] for each in json.loads(path.read_text())["epochs"]]


def test_a_resumed_run_keeps_what_is_told_of_it_before(tmp_path):
    place = tmp_path / "report"
    resumed(tmp_path, 2)
    resumed(tmp_path, 2)  # it had finished: nothing more is to be told
    assert sorted(p.name for p in place.iterdir()) == ["report.html", "summary.json"]
    assert passes_in(place / "summary.json") == [0, 1]
    resumed(tmp_path, 4)
    resumed(tmp_path, 5)
    told = {path.name: passes_in(path) for path in place.glob("summary*.json")}
    assert told == {
        "summary.1.json": [0, 1],
        "summary.2.json": [2, 3],
        "summary.json": [4],
    }
    assert {p.name for p in place.glob("*.html")} == {
        "report.1.html",
        "report.2.html",
        "report.html",
    }
    output = str(tmp_path / "all.html")
    assert main(["report", *map(str, place.glob("*.json")), "--output", output]) == 0


def test_a_resumed_run_that_dies_before_a_pass_ends_tells_its_error(tmp_path):
    resumed(tmp_path, 1)
    with pytest.raises(RuntimeError, match="again"):
        resumed(tmp_path, 2, error=RuntimeError("again"))
    place = tmp_path / "report"
    ended = {
        path.name: json.loads(path.read_text())["ended"]
        for path in place.glob("summary*.json")
    }
    assert ended == {
        "summary.1.json": "well",
        "summary.json": {"error": "RuntimeError", "text": "again"},
    }


def test_a_run_that_is_not_resumed_replaces_the_report_that_is_there(tmp_path):
    for epochs in (2, 1):
        settings = config(report=str(tmp_path))
        with make_engine(freeze=schedule(0), depth=1, config=settings) as engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(ToySet(8), 8):
                    engine.step(batch)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "summary.json"]
    assert passes_in(tmp_path / "summary.json") == [0]


def test_a_rank_that_the_others_have_removed_leaves_their_report_alone(tmp_path):
    engine = make_engine(
        freeze=schedule(0), depth=1, config=config(report=str(tmp_path))
    )
    with pytest.raises(pt.PeerFailure), engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(8), 8):
                engine.step(batch)
        in_force = run_of(engine).in_force
        layout = dataclasses.replace(in_force.layout, active=(0, 1))
        run_of(engine).in_force = dataclasses.replace(in_force, layout=layout)
        (tmp_path / "summary.json").write_text("of the others")
        raise pt.PeerFailure(0, "fenced", reason="the others went on")
    assert (tmp_path / "summary.json").read_text() == "of the others"


def test_the_page_replaces_a_link_and_leaves_what_it_leads_to(summary, tmp_path):
    (tmp_path / "precious").write_text("key")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious")
    write_page({"one": summary}, tmp_path / "report.html")
    assert (tmp_path / "precious").read_text() == "key"
    assert "<html" in (tmp_path / "report.html").read_text()


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["decisions"][0]["statistics"].update(x=nested(900)),
        lambda s: s.update(world_size=2**40),
    ],
)
def test_what_no_browser_could_show_is_refused(change, summary, tmp_path, capsys):
    value = json.loads(json.dumps(summary))
    change(value)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(value))
    assert main(["report", str(path), "--output", str(tmp_path / "x.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
