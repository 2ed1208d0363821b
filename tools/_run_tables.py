"""Tables of whole fine-tuning runs: table1_speedup, fig10_alpha and demo_seeds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from _markdown import Content, markdown, median_and_range, speedup, with_range

BASELINE, AGAIN = "static-pipe", "static-pipe again"
FULL, KEPT, UNCACHED = "full", "full, profile kept", "freeze+pipe+dp"
TRAINING = " without evaluation"  # ends the name of a ratio of training times


def table1(content: Content) -> list[str]:
    """Wall time and speed-up over static-pipe of each system, in each setting."""
    settings = list(content["settings"])
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    ratios = _by_name(content)
    headers = ["system"]
    for setting in settings:
        headers += [f"{setting}: seconds", f"x {BASELINE}", "x without evaluation"]
    lines = []
    for system in dict.fromkeys(system for system, _ in cells):
        line = [system]
        for setting in settings:
            row = cells.get((system, f"{setting} wall time"))
            line.append(
                median_and_range(row) if row else _why_not(content, setting, system)
            )
            for kind in ("", TRAINING):
                ratio = ratios.get(f"{setting} {system} / {BASELINE}{kind}")
                own = "1.00" if system == BASELINE and row else "-"
                line.append(own if ratio is None else speedup(ratio))
        lines.append(line)
    return [*markdown(headers, lines), "", *_rounds(content, ratios, settings)]


def _by_name(content: Content) -> dict[str, Content]:
    return {each["name"]: each for each in content["ratios"]}


def _why_not(content: Content, setting: str, system: str) -> str:
    found = content["settings"][setting]
    if system in found["does_not_fit"]:
        return "does not fit"
    same = found["same_as"].get(system)
    return f"as {same}" if same else "not run"


def _rounds(
    content: Content, ratios: Mapping[str, Content], settings: list[str]
) -> list[str]:
    """How the columns were formed, and what the smallest meaningful ratio is."""
    runs = content["rounds"]["runs"]
    dropped = sum(bool(each["dropped"]) for each in runs)
    told = [
        f"Seconds: medians of the {len(runs) - dropped} rounds that count ({dropped} "
        "dropped as disturbed). Ratios: medians of these rounds' own ratios."
    ]
    again = ratios.get(f"{settings[0]} {AGAIN} / {BASELINE}")
    if again is not None:
        told.append(
            f"`{AGAIN}` is the same system once more: {with_range(again)}. Nothing in "
            "the table means more than that."
        )
    return told


def bounds(content: Content) -> list[str]:
    """Speed-up of the whole system over each rival, against its bound."""
    ratios = _by_name(content)
    lines = []
    for setting, whole in itertools.product(content["settings"], (FULL, KEPT)):
        first = f"{setting} {whole} / "
        for name, ratio in ratios.items():
            if not name.startswith(first) or name.endswith(TRAINING):
                continue
            rival = name.removeprefix(first)
            line = [f"{whole} over {rival}, {setting}"]
            unbounded = "other threads" if rival == "plain" else "equal work"
            for each in (ratio, ratios.get(f"{name}{TRAINING}")):
                line += _against_bound(each, unbounded)
            lines.append(line)
    headers = ["ratio", "measured", "bound", "share"]
    headers += ["without evaluation", "bound", "share"]
    return [*markdown(headers, lines), "", *_plans(content), *_uncached(ratios)]


def _against_bound(ratio: Content | None, unbounded: str) -> list[str]:
    if ratio is None:
        return ["-", "-", "-"]
    value, bound = ratio["value"], ratio["bound"]
    if bound is None:
        return [with_range(ratio), unbounded, "-"]
    share = "-" if value > bound else f"{value / bound:.0%}"
    if ratio["met"] is False:
        share += f", **missed** ({ratio['target']['at_least'] / bound:.0%})"
    return [with_range(ratio), f"{bound:.2f}", share]


def _plans(content: Content) -> list[str]:
    """Stages and replicas of the whole system, epoch by epoch."""
    told = []
    for setting, sections in content["settings"].items():
        epochs = sections["throughput"].get(FULL, [])
        shapes = [
            " or ".join(dict.fromkeys(f"{k} x {r}" for k, r, _ in epoch["plans"]))
            for epoch in epochs
        ]
        runs = [(shape, len(list(some))) for shape, some in itertools.groupby(shapes)]
        if runs:
            listed = ", then ".join(f"{shape} ({count})" for shape, count in runs)
            told.append(f"{setting} {listed}")
    return (
        [f"Stages x replicas of `{FULL}` (epochs): {'; '.join(told)}."] if told else []
    )


def _uncached(ratios: Mapping[str, Content]) -> list[str]:
    """What is left where nothing can be cached."""
    start = f"no-cap {UNCACHED} / "
    told = [
        f"{speedup(ratio)} over {name.removeprefix(start)}"
        for name, ratio in ratios.items()
        if name.startswith(start) and not name.endswith(TRAINING)
    ]
    if not told:
        return []
    return [f"Where inputs are augmented nothing can be cached: {', '.join(told)}."]


def accuracy(content: Content) -> list[str]:
    """Speed-up and paired accuracy of each freezing pace against unfrozen."""
    ratios = _by_name(content)
    lines = []
    for system, test in content["accuracy"].items():
        ratio = ratios[f"{system} / unfrozen"]
        told = "-" if ratio["bound"] is None else f"{ratio['bound']:.2f}"
        lines.append([system, speedup(ratio), told, *_test(test)])
    return markdown(["system", "x unfrozen", "bound", *TEST_HEADERS], lines)


def paired(content: Content) -> list[str]:
    """Accuracy of each system, and the paired test of those that have one."""
    lines = []
    for row in content["rows"]:
        test = content["accuracy"].get(row["system"])
        told = ["-"] * len(TEST_HEADERS) if test is None else _test(test)
        lines.append([row["system"], median_and_range(row), *told])
    return markdown(["system", "final accuracy (%)", *TEST_HEADERS], lines)


TEST_HEADERS = ["points by seed", "mean", "95 % lower limit", "margin"]


def _test(test: Content) -> list[str]:
    """The cells of a paired non-inferiority test, with its verdict."""
    passes = test["lower_limit"] > -test["margin"]
    return [
        ", ".join(f"{each:+.2f}" for each in test["differences"]),
        f"{test['mean']:+.2f}",
        f"{test['lower_limit']:+.2f}",
        f"{test['margin']}: {'passes' if passes else '**fails**'}",
    ]
