"""Questions about paragraphs: reading, windows of tokens, answers and their scores.

Scores are those of SQuAD 1.1 (Rajpurkar et al., EMNLP 2016, section 6.1).
"""

from __future__ import annotations

import collections
import json
import re
import string
from pathlib import Path

from torch.utils.data import Dataset

LONGEST_ANSWER = 30  # tokens


def read(folder: Path | None) -> tuple[list[dict], list[dict]]:
    """Return questions for training and test; no paragraph is in both.

    Args:
        folder: With xquad.en.json; None: the datasets library loads it.
    """
    if folder is None:
        from datasets import load_dataset

        found = list(load_dataset("google/xquad", "xquad.en", split="validation"))
    else:
        articles = json.loads((folder / "xquad.en.json").read_text())["data"]
        found = [
            {
                "question": entry["question"],
                "context": paragraph["context"],
                "answers": {
                    "text": [a["text"] for a in entry["answers"]],
                    "answer_start": [a["answer_start"] for a in entry["answers"]],
                },
            }
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    contexts = list(dict.fromkeys(row["context"] for row in found))
    held_out = set(contexts[4::5])
    return (
        [row for row in found if row["context"] not in held_out],
        [row for row in found if row["context"] in held_out],
    )


class Windows(Dataset):
    """One sample for each window of a paragraph, with the answer's ends as tokens.

    An answer that is not in the window is at token 0.
    """

    def __init__(self, tokenizer, rows: list[dict], length: int) -> None:
        self.question, self.offsets, self.samples = [], [], []
        for row, entry in enumerate(rows):
            made = tokenizer(
                entry["question"].strip(),
                entry["context"],
                truncation="only_second",
                max_length=length,
                stride=length // 3,
                padding="max_length",  # the loss is taken over all positions
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            begin = entry["answers"]["answer_start"][0]
            end = begin + len(entry["answers"]["text"][0])
            for window, offsets in enumerate(made["offset_mapping"]):
                parts = made.sequence_ids(window)
                text = [i for i, part in enumerate(parts) if part == 1]
                inside = [
                    i for i in text if offsets[i][0] < end and offsets[i][1] > begin
                ]
                whole = offsets[text[0]][0] <= begin and offsets[text[-1]][1] >= end
                places = (inside[0], inside[-1]) if whole and inside else (0, 0)
                self.question.append(row)
                self.offsets.append({i: offsets[i] for i in text})
                names = tokenizer.model_input_names
                sample = {name: made[name][window] for name in names if name in made}
                sample["start_positions"], sample["end_positions"] = places
                self.samples.append(sample)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        return dict(self.samples[index])


def answers(rows: list[dict], windows: Windows, logits) -> list[str]:
    """Return the best span of each question over all of its windows."""
    best = [(-float("inf"), "")] * len(rows)
    for i, (starts, ends) in enumerate(zip(*logits, strict=True)):
        offsets, row = windows.offsets[i], windows.question[i]
        for start in [t for t in starts.topk(20).indices.tolist() if t in offsets]:
            for end in [t for t in ends.topk(20).indices.tolist() if t in offsets]:
                score = float(starts[start] + ends[end])
                if start <= end < start + LONGEST_ANSWER and score > best[row][0]:
                    span = slice(offsets[start][0], offsets[end][1])
                    best[row] = score, rows[row]["context"][span]
    return [text for _, text in best]


def normalized(text: str) -> str:
    """Return lower-case words without punctuation and articles, as SQuAD 1.1 does."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, truth: str) -> float:
    return float(normalized(answer) == normalized(truth))


def f1(answer: str, truth: str) -> float:
    mine, theirs = normalized(answer).split(), normalized(truth).split()
    same = sum((collections.Counter(mine) & collections.Counter(theirs)).values())
    return 2 * same / (len(mine) + len(theirs)) if same else 0.0


def scores(found: list[str], rows: list[dict]) -> dict[str, float]:
    """Return percentages; of several true answers the best one counts."""
    totals = {"exact_match": 0.0, "f1": 0.0}
    for text, row in zip(found, rows, strict=True):
        for name, score in (("exact_match", exact_match), ("f1", f1)):
            totals[name] += max(score(text, true) for true in row["answers"]["text"])
    return {name: 100 * total / len(rows) for name, total in totals.items()}
