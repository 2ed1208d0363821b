"""What the engine costs above a loop: rounds, parts of a profile, a case that fails."""

import cProfile
import itertools
import json
import pstats
import sys
import time
from pathlib import Path

import pytest

import engine_overhead
from harness.child import RunFailed
from pipetransformer.report.clock import Clock
from tests.support import fork_server
from training import engine_steps, step_parts
from training.engine_steps import AGAIN, ALONE, CASES, ENGINE, PLAIN, REPLICAS, Effort
from training.step_parts import CACHE, CLOCKS, LOOP, PIPE, TORCH, Own, Profile

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES

ROOT = Path(__file__).parents[2]
EFFORT = Effort(rounds=6, steps=3, warm=1, profiled=2)


class Machine:
    """A clock that only steps move on."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def steps(self, name, seconds):
        for each in itertools.cycle(seconds):
            self.now += each
            self.order.append(name)
            yield None


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(engine_steps.time, "perf_counter", lambda: made.now)
    return made


def rounds_of(machine, engine):
    plain = (2e-3, 3e-3, 2e-3)  # one of three steps is disturbed
    systems = {
        ENGINE: machine.steps(ENGINE, engine),
        PLAIN: machine.steps(PLAIN, plain),
        AGAIN: machine.steps(AGAIN, plain),
    }
    return list(engine_steps.in_turns(systems, EFFORT.rounds, EFFORT.steps))


def log_of(machine, engine, slower=0.0):
    lines = [
        {
            "kind": "round",
            **{
                figure: {name: slower + of(times) for name, times in found.items()}
                for figure, of in (("median", lambda t: sorted(t)[1]), ("mean", max))
            },
        }
        for found in rounds_of(machine, engine)
    ]
    return [*lines, {"kind": "end"}]


def median_of(rows, metric):
    (row,) = (row for row in rows if row.metric == metric)
    return row


def test_engine_that_sleeps_a_millisecond_a_step_is_a_millisecond_above(machine):
    log = log_of(machine, (3.1e-3,))
    found = engine_steps.read_logs(ALONE, EFFORT, [log], [""], 1.0)
    rows = engine_overhead.rows_of(ALONE, found)
    above = median_of(rows, "above")
    assert above.values == pytest.approx((1100.0,) * 6)
    assert median_of(rows, "again above").values == pytest.approx((0.0,) * 6, abs=1e-6)
    assert "missed" in engine_overhead.told(above)
    quick = engine_steps.read_logs(
        ALONE, EFFORT, [log_of(machine, (2.19e-3,))], [""], 1.0
    )
    near = median_of(engine_overhead.rows_of(ALONE, quick), "above")
    assert engine_overhead.told(near) == "190 (190 to 190), aim 200"


def test_systems_come_in_all_orders(machine):
    rounds_of(machine, (1e-3,))
    turns = machine.order[:: EFFORT.steps]
    orders = {tuple(turns[k : k + 3]) for k in range(0, 18, 3)}
    assert orders == set(itertools.permutations((ENGINE, PLAIN, AGAIN)))


def test_slower_rank_counts(machine):
    logs = [log_of(machine, (3e-3,)), log_of(machine, (3e-3,), slower=1e-3)]
    found = engine_steps.read_logs(REPLICAS, EFFORT, logs, ["", ""], 1.0)
    assert found.medians[ENGINE] == pytest.approx([4000.0] * 6)


def test_rank_without_an_end_fails_its_case(machine):
    log = log_of(machine, (1e-3,))
    with pytest.raises(RunFailed, match="expected the end of rank 0 within 9 s, got r"):
        engine_steps.read_logs(ALONE, EFFORT, [log[:-1]], [""], 9.0)
    with pytest.raises(RunFailed, match="rank 1 failed:\nboom"):
        engine_steps.read_logs(REPLICAS, EFFORT, [log, log], ["", "boom"], 9.0)
    with pytest.raises(RunFailed, match="expected 6 rounds of each rank"):
        engine_steps.read_logs(ALONE, EFFORT, [log[1:]], [""], 9.0)


def hang(rank, folder, name, effort):
    """Stands in for a rank that waits for nothing."""
    time.sleep(600.0)


def test_case_that_hangs_fails_at_its_deadline(monkeypatch):
    fork_server.context()  # the tests' own: there is one per process
    monkeypatch.setattr(engine_steps, "run_rank", hang)
    with pytest.raises(RunFailed, match=r"the end of rank 0 within 0\.2 s, got nothin"):
        engine_steps.measure_case(REPLICAS, EFFORT, timeout_s=0.2)


# -- parts -----------------------------------------------------------------------

PACKAGE = step_parts._ROOTS["pipetransformer"]
TORCHS = step_parts._ROOTS["torch"]
PIPE_CALL = (f"{PACKAGE}/pipe/pipe.py", 1, "forward")
FETCH = (f"{PACKAGE}/autocache/cache.py", 1, "fetch")
PHASE = (f"{PACKAGE}/report/clock.py", 1, "phase")
WALK = (f"{TORCHS}/nn/modules/module.py", 1, "named_modules")
LAYER = (f"{TORCHS}/nn/modules/module.py", 2, "_call_impl")
ENTER = ("/lib/contextlib.py", 1, "__enter__")
SIZE = ("~", 0, "<built-in method builtins.len>")


def entry(own_s, calls=2, **callers):
    return calls, calls, own_s, own_s, callers.get("of", {})


def by(caller, own_s, calls=2):
    return {caller: (calls, calls, own_s, own_s)}


def test_own_time_goes_to_the_part_or_to_the_callers():
    parts = Profile(
        {
            PIPE_CALL: entry(4e-6),
            FETCH: entry(2e-6),
            SIZE: entry(4e-6, of={**by(PIPE_CALL, 3e-6), **by(FETCH, 1e-6)}),
            WALK: entry(6e-6, of={**by(WALK, 5e-6), **by(PIPE_CALL, 1e-6)}),
            LAYER: entry(8e-6, of=by(PIPE_CALL, 8e-6)),
        }
    ).parts(steps=2)
    assert parts[PIPE].us == pytest.approx((4 + 3 + 6) / 2)
    assert parts[CACHE].us == pytest.approx((2 + 1) / 2)
    assert parts[TORCH] == Own(us=4.0, calls=1.0)
    assert parts[PIPE].c_calls == pytest.approx(0.75)
    assert parts.keys() == {PIPE, CACHE, TORCH}


def test_what_begins_a_block_counts_for_what_is_entered():
    parts = Profile(
        {
            PIPE_CALL: entry(1e-6),
            PHASE: entry(1e-6, of=by(step_parts.NEXT, 1e-6)),
            ENTER: entry(4e-6, of=by(PIPE_CALL, 4e-6)),
        }
    ).parts(steps=1)
    assert parts[CLOCKS].us == pytest.approx(5.0)


def test_nothing_of_a_real_profile_is_lost():
    clock, profiler = Clock(), cProfile.Profile()
    profiler.enable()
    for _ in range(5):
        with clock.phase("forward"):
            sum(range(100))
    profiler.disable()
    stats = pstats.Stats(profiler)
    parts = step_parts.parts_of(stats, 5)
    assert sum(own.us for own in parts.values()) == pytest.approx(2e5 * stats.total_tt)
    assert parts[CLOCKS].calls > 3 and parts.keys() <= {*step_parts.PARTS}


def test_each_place_of_the_table_is_there():
    for place in step_parts.PLACES:
        package, _, rest = place.partition("/")
        path = Path(step_parts._ROOTS[package], rest)
        assert path.is_dir() or path.with_suffix(".py").is_file(), place
    for name in step_parts.HOOKS:
        files = (ROOT / "pipetransformer").rglob("*.py")
        assert any(f"def {name}(" in path.read_text() for path in files), name


# -- the script ------------------------------------------------------------------


@pytest.mark.distributed
def test_script_runs_and_its_table_can_be_rendered(tmp_path, monkeypatch, capsys):
    fork_server.context()
    monkeypatch.setattr(engine_overhead, "QUICK", EFFORT)
    path = tmp_path / "engine_overhead.json"
    assert engine_overhead.main(["--quick", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    assert [row["system"] for row in content["rows"]][::6] == list(CASES)
    assert content["stack"][ALONE.name]["frames"] > 2
    table = "\n".join(TABLES["steps"](content))
    assert all(f"| {name} |" in table for name in (*CASES, PIPE, LOOP))
    assert "frames in" in capsys.readouterr().out


def test_case_that_fails_is_shown_and_fails_the_script(monkeypatch, capsys):
    def broken(case, *_, **__):
        raise RunFailed(f"{case.name}: broke")

    monkeypatch.setattr(engine_overhead, "measure_case", broken)
    monkeypatch.setattr(engine_overhead, "fork_server", lambda *_: None)
    assert engine_overhead.main(["--quick", f"--cases={ALONE.name}"]) == 1
    told = capsys.readouterr()
    assert "failed: one process: broke" in told.err and "failed" in told.out
