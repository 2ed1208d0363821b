"""The benchmark of the signals' cost, on a few samples."""

import pytest

import signal_cost
from harness import results


def test_policies_that_only_watch_change_no_loss(monkeypatch, tmp_path, capsys):
    found = {}

    def keep(path, name, rows, ratios, **_):
        found.update(path=path, name=name, rows=rows, ratios=ratios)

    monkeypatch.setattr(signal_cost, "write_json", keep)
    assert signal_cost.main(["--quick", f"--json={tmp_path / 'found.json'}"]) == 0
    assert found["name"] == "signal_cost"
    times, shares = (
        {row.system: row for row in found["rows"] if row.metric == metric}
        for metric in ("time", "share")
    )
    assert times.keys() == set(signal_cost.SYSTEMS)
    assert shares.keys() == set(signal_cost.SYSTEMS) - {"never", "never again"}
    assert all(row.median > 0 for row in found["rows"])
    assert all(row.median < 100 for row in shares.values())
    judged = [row.system for row in shares.values() if row.target is not None]
    assert len(found["ratios"]) == 5 and len(judged) == 3
    assert "percent above never" in capsys.readouterr().out


def test_a_policy_that_freezes_is_found(monkeypatch):
    bench = signal_cost.Bench(samples=64, epochs=2)
    bench.run(signal_cost.NEVER, 0)
    freezing = {"hasty": lambda: signal_cost.pt.freeze.Schedule([0, 8])}
    monkeypatch.setattr(signal_cost, "SYSTEMS", freezing)
    with pytest.raises(RuntimeError, match="hasty: expected the losses of never"):
        bench.run("hasty", 0)


def test_more_than_half_a_percent_is_missed():
    target = results.Target(signal_cost.MOST, of="median")
    assert target.judged({"median": 0.4})["met"]
    assert not target.judged({"median": 0.6})["met"]
