"""Scores of answers, by the published rules of SQuAD 1.1, and windows of paragraphs."""

import pathlib
import sys

import pytest

from tests.support.pretrained import data_folder, model_folder, need

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import squad


@pytest.mark.parametrize(
    "text, words",
    [
        ("The Denver Broncos.", "denver broncos"),
        ("an  apple, a pear;\tthe  plum", "apple pear plum"),
        ("there", "there"),  # an article within a word stays
        ("a-b", "ab"),  # punctuation goes before articles do
        ("The", ""),
        ("$5,000", "5000"),
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text, words):
    assert squad.normalized(text) == words


@pytest.mark.parametrize(
    "answer, truth, exact, f1",
    [
        ("the Panthers", "Panthers!", 1.0, 1.0),
        ("Carolina Panthers", "Panthers", 0.0, 2 / 3),
        ("red red blue", "red blue blue", 0.0, 2 / 3),  # a word as often as in both
        ("Denver", "Carolina", 0.0, 0.0),
        ("", "Carolina", 0.0, 0.0),
        ("the", "", 1.0, 0.0),
    ],
)
def test_exact_match_and_f1_of_one_answer(answer, truth, exact, f1):
    assert squad.exact_match(answer, truth) == exact
    assert squad.f1(answer, truth) == pytest.approx(f1)


def test_the_best_of_several_true_answers_counts_and_scores_are_percentages():
    rows = [
        {"answers": {"text": ["Denver Broncos", "Broncos"]}},
        {"answers": {"text": ["1899"]}},
    ]
    found = squad.scores(["broncos", "in 1899"], rows)
    assert found == {"exact_match": 50.0, "f1": pytest.approx(100 * (1 + 2 / 3) / 2)}


def test_no_paragraph_is_both_in_training_and_in_the_test():
    train, test = squad.read(data_folder("xquad"))
    assert len(train) + len(test) == 1190
    contexts = [{row["context"] for row in rows} for rows in (train, test)]
    assert not contexts[0] & contexts[1]
    assert len(contexts[0]) + len(contexts[1]) == 240 and len(contexts[1]) == 48


def test_windows_hold_every_answer_and_name_its_tokens(tmp_path):
    need("transformers")
    folder = model_folder(tmp_path)
    from transformers import AutoTokenizer

    _, rows = squad.read(data_folder("xquad"))
    windows = squad.Windows(AutoTokenizer.from_pretrained(folder), rows[:60], 128)
    assert len(windows) > 60, "paragraphs of several windows"
    found = set()
    for i, sample in enumerate(windows.samples):
        begin, end = sample["start_positions"], sample["end_positions"]
        if (begin, end) == (0, 0):
            continue
        row, offsets = rows[windows.question[i]], windows.offsets[i]
        text = row["context"][offsets[begin][0] : offsets[end][1]]
        assert row["answers"]["text"][0] in text
        assert squad.f1(text, row["answers"]["text"][0]) > 0.5
        found.add(windows.question[i])
    assert len(found) >= 58, "answers longer than the overlap may be in no window"
