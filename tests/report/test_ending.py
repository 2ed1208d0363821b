"""How a run ended: said in its history, its summary and its page."""

import json

import pytest

from pipetransformer.core.wire import check_str
from pipetransformer.report import Ending, History


@pytest.mark.parametrize(
    ("error", "said", "sentence"),
    [
        (None, "well", "ended well"),
        (
            ValueError("no\nroom \x1b[1m"),
            {"error": "ValueError", "text": "no room \\x1b[1m"},
            "ended with ValueError: no room \\x1b[1m",
        ),
        (
            KeyboardInterrupt(),
            {"error": "KeyboardInterrupt", "text": ""},
            "ended with KeyboardInterrupt",
        ),
    ],
)
def test_an_ending_is_told_in_one_line_and_reads_what_it_wrote(error, said, sentence):
    ending = Ending.of(error)
    content = json.loads(json.dumps(ending.to_json()))
    assert content == said and str(ending) == sentence
    assert ending.is_good == (error is None)
    assert Ending.from_json(content, "ended") == ending


def test_of_a_long_error_the_beginning_is_kept():
    ending = Ending.of(RuntimeError("x" * 5000))
    assert len(ending.text) == 500 and ending.text.startswith("xxx")
    assert check_str(ending.text, "text") == ending.text


def test_a_history_that_goes_on_has_no_ending():
    assert History(world_size=1, seed=0).to_json()["ended"] is None


@pytest.mark.parametrize(
    "value", ["badly", 3, [], {}, {"error": "E"}, {"error": 3, "text": ""}]
)
def test_what_is_no_ending_is_refused_by_name(value):
    with pytest.raises(ValueError, match="^summary ended.*: expected"):
        Ending.from_json(value, "summary ended")
