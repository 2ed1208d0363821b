"""The methods, the optimum they are judged by, and what the script writes."""

import json
import random
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest

import partition_quality
from planner import layer_rows, partitioners
from planner.layer_rows import LayerRow, model_rows, random_row
from planner.partitioners import OURS, PARTITIONERS, optimum

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES

ROWS = [random_row(kind, seed) for kind in layer_rows.TIMES for seed in range(24)]


def row_of(times, num_stages, copies=None):
    copies = copies or [0] * (len(times) + 1)
    return LayerRow("test", times, times, copies, num_stages)


def test_ours_is_optimal_on_250_instances():
    rows = ROWS + model_rows()
    assert len(rows) == 250
    for row in rows:
        assert row.largest_stage(partitioners.ours(row)) == optimum(row), row


def test_optimum_is_that_of_enumeration():
    rng = random.Random(0)
    for _ in range(100):
        n = rng.randint(1, 8)
        times = [rng.randint(0, 50) for _ in range(n)]
        copies = [0, *(rng.randint(0, 9) for _ in range(n - 1)), 0]
        row = row_of(times, rng.randint(1, n), copies)
        assert optimum(row) == min(
            row.largest_stage((0, *inner, n))
            for inner in combinations(range(1, n), row.num_stages - 1)
        )


@pytest.mark.parametrize("name", PARTITIONERS)
def test_every_method_cuts_all_layers_in_order_and_none_beats_the_optimum(name):
    for row in ROWS[::5]:
        cuts = PARTITIONERS[name](row)
        assert len(cuts) == row.num_stages + 1
        assert cuts[0] == 0 and cuts[-1] == len(row.times)
        assert cuts == sorted(cuts)
        assert row.largest_stage(cuts) >= optimum(row)


def test_block_partition_evens_out_to_the_largest_layer():
    for row in ROWS:
        times = [max(1, time) for time in row.times]
        cuts = partitioners.block_partition(row)
        sizes = [sum(times[a:b]) for a, b in pairwise(cuts)]
        assert max(sizes) - min(sizes) <= max(times)


def test_equal_counts_differ_by_one_layer():
    assert partitioners.equal_counts(row_of([1] * 8, 3)) == [0, 3, 6, 8]


def test_rows_are_the_same_for_equal_seeds():
    assert random_row("skips", 3) == random_row("skips", 3)
    assert random_row("skips", 3) != random_row("skips", 4)
    assert len(random_row("uniform", 0, num_layers=300).times) == 300


def test_unit_times_count_multiplications_and_scores():
    width, tokens = 768, 197
    times = layer_rows.unit_times(layer_rows.VIT_B, tokens, width)
    attention = 2 * tokens * 2_363_904 + 4 * tokens**2 * width
    passed = 10 * tokens * width
    assert times[1] == 3 * attention // 1000
    assert times[2] == 3 * 2 * tokens * 4_723_968 // 1000
    assert times[0] == times[25] == 3 * passed // 1000
    assert times[26] == 3 * 2 * 769_000 // 1000


def test_summary_takes_the_nearest_rank():
    values = [1.0] * 17 + [2.0, 2.0, 8.0]
    found = partition_quality.summary(values)
    assert found["p90"] == 2.0 and found["max"] == 8.0
    assert found["optimal"] == 17 / 20
    assert found["geomean"] == pytest.approx(2 ** (5 / 20))


def test_script_writes_rows_ratios_and_summaries(tmp_path, capsys):
    path = tmp_path / "quality.json"
    assert partition_quality.main(["--quick", "--repeats=2", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    assert content["quick"] and content["name"] == "partition_quality"
    assert content["instances"] == 18 + 34
    assert [row["system"] for row in content["rows"]] == list(PARTITIONERS)
    assert content["summary"][OURS]["geomean"] == 1
    assert len(content["ratios"]) == len(PARTITIONERS) - 1
    assert "Block Partition" in capsys.readouterr().out
    assert "| ours | 1.000 | 1.000 | 1.000 | 100% |" in TABLES["quality"](content)
