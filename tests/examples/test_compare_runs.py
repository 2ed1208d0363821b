"""The comparison that ends the demo."""

import json

import pytest

from compare_runs import comparison, load_summary


def _summary(shapes, seconds, accuracy):
    epochs = [
        {
            "num_stages": stages,
            "num_replicas": replicas,
            "num_frozen_layers": 2 * number,
            "optimizer_steps": 34,
            "samples": 1078,
            "cache_hits": 1078 * (number > 0),
        }
        for number, (stages, replicas) in enumerate(shapes)
    ]
    return {
        "version": 1,
        "epochs": epochs,
        "transformations": [{}] * (len(set(shapes)) - 1),
        "final_accuracy": accuracy,
        "total_seconds": seconds,
    }


ELASTIC = _summary([(4, 1), (2, 2), (2, 2), (1, 4)], 20.0, 0.97)
STATIC = _summary([(4, 1)] * 4, 50.0, 0.975)


def test_comparison_shows_plans_time_and_accuracy():
    text = comparison(ELASTIC, STATIC)
    assert "4x1 -> 2x2 -> 1x4" in text
    assert "static / elastic = 2.50" in text
    assert "elastic - static = -0.50 points" in text
    assert "one pair of runs judges no accuracy: make seeds tests five" in text
    steps = next(line for line in text.splitlines() if "optimizer steps" in line)
    assert steps.split() == ["optimizer", "steps", "136", "136"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "expected version 1, got 2"),
        ({"final_accuracy": None}, "expected a final_accuracy, got None"),
    ],
)
def test_summary_that_cannot_be_compared_is_refused(tmp_path, change, text):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**ELASTIC, **change}))
    with pytest.raises(ValueError, match=text):
        load_summary(path)
