"""The one table of the README: a row per question, each from a result file.

A row without a file says that this was not measured on this version, and the command
that measures it. A missed target, a failed test and a figure above its bound say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from _markdown import Content, marked, number, with_range

Cells = tuple[str, str]  # the figure, and what it is measured against
HEADERS = ("question", "measured", "aim", "commit")
TIMES = " times as fast"


@dataclass(frozen=True)
class Question:
    """One row.

    Attributes:
        text: What is asked.
        name: Of the result file, without ``.json``.
        page: Of docs/results, without ``.md``, where the whole table stands.
        cells: Reads the answer out of the file.
    """

    text: str
    name: str
    page: str
    cells: Callable[[Content], Cells]


def headline(found: Mapping[str, Content | None], pages: str) -> list[str]:
    """The table's lines.

    Args:
        found: Result files by name; None for what was not measured.
        pages: The folder of the pages, as a link from the page of this table.
    """
    lines = []
    for question in QUESTIONS:
        content = found[question.name]
        if content is None:
            command = f"`python benchmarks/bench.py {question.name}`"
            cells = (f"Not measured on this version ({command})", "-", "-")
        else:
            cells = (*question.cells(content), f"`{content['commit'][:7]}`")
        lines.append([f"[{question.text}]({pages}/{question.page}.md)", *cells])
    rule = ["---"] * len(HEADERS)
    table = [f"| {' | '.join(line)} |" for line in (HEADERS, rule, *lines)]
    return [*table, "", *machines(found)]


def machines(found: Mapping[str, Content | None]) -> list[str]:
    """Where the figures were measured."""
    measured = [content["machine"] for content in found.values() if content]
    told = dict.fromkeys(
        f"{each['cpu']}, {each['gpu'] or 'no GPU'}, {each['cores']} cores, torch "
        f"{each['torch']}"
        for each in measured
    )
    return [f"Measured on {'; '.join(told)}."] if told else []


def against(setting: str, rival: str) -> Callable[[Content], Cells]:
    """How much faster whole runs are than a rival's."""

    def cells(content: Content) -> Cells:
        same_as = content["settings"][setting]["same_as"]
        name = f"{setting} full / {same_as.get(rival, rival)}"
        (ratio,) = (each for each in content["ratios"] if each["name"] == name)
        if ratio["bound"] is None:
            return f"{with_range(ratio)}{TIMES}", "equal work: about 1"
        aim = (
            "-" if (target := ratio["target"]) is None else f"{target['at_least']:.2f}"
        )
        return f"{with_range(ratio)}{TIMES}", marked(
            f"{aim} of a bound of {ratio['bound']:.2f}", ratio
        )

    return cells


def pipelining(content: Content) -> Cells:
    """Each schedule's least and greatest speed-up over torch's pipeline."""
    pairs: dict[str, list[Content]] = {}
    for ratio in content["ratios"]:
        ours, _, rival = ratio["name"].partition(" / pipelining ")
        if rival:
            theirs, kind = rival.partition(" ")[0], ours.partition(" ")[0]
            other = "" if theirs == kind else f" over its {theirs}"
            pairs.setdefault(f"{kind}{other}", []).append(ratio)
    told = [
        f"{kind}: {_span([each['value'] for each in ratios])}"
        for kind, ratios in pairs.items()
    ]
    return f"{'; '.join(told)}{TIMES}", _verdict("1", [*sum(pairs.values(), [])])


def pauses(content: Content) -> Cells:
    """The median pauses of the demo model's changes of plan, least to greatest."""
    rows = [
        row
        for row in content["rows"]
        if row["system"].startswith("demo model, ") and "ahead" not in row["system"]
    ]
    medians = [row["median"] for row in rows if row["metric"] == "pause"]
    still = [row for row in rows if row["metric"] == "without moved bytes"]
    told = f"{number(min(medians))} to {number(max(medians))} ms"
    return told, _verdict("1 step besides the move", still)


def time_to_error(content: Content) -> Cells:
    """Killed ranks, until the last survivor has its error, in the slowest repeat."""
    rows = [
        row
        for row in content["rows"]
        if row["metric"] == "last survivor" and row["system"].startswith("killed")
    ]
    slowest = max(rows, key=lambda row: row["max"])
    target = slowest["target"]
    aim = "-" if target is None else f"{number(target['at_most'])} ms"
    return f"at most {number(slowest['max'])} ms", marked(aim, slowest)


def quality(content: Content) -> Cells:
    """The planner's slowest stage over the least possible one."""
    ours, paper = (
        content["summary"][name] for name in ("ours", "paper greedy, parameters")
    )
    (row,) = (row for row in content["rows"] if row["system"] == "ours")
    told = f"{ours['max']:.3f} at most in {content['instances']} cases"
    aim = f"1.000; the paper's rule: {paper['geomean']:.2f} on average"
    return told, marked(aim, row)


def accuracy(content: Content) -> Cells:
    """The demo's paired test of frozen against static runs."""
    (test,) = content["accuracy"].values()
    seeds = len(test["differences"])
    told = (
        f"{test['mean']:+.2f} points over {seeds} seeds, "
        f"95 % lower limit {test['lower_limit']:+.2f}"
    )
    passes = test["lower_limit"] > -test["margin"]
    return told, f"above -{test['margin']}: {'passes' if passes else '**fails**'}"


def engine_step(content: Content) -> Cells:
    """What the engine adds to a step in one process."""
    rows = [row for row in content["rows"] if row["metric"] == "above"]
    told = [f"{row['system']}: {number(row['median'])} us" for row in rows]
    aims = [
        marked(number(row["target"]["at_most"]), row) if row["target"] else "-"
        for row in rows
    ]
    return "; ".join(told), ", ".join(aims)


def faults(content: Content) -> Cells:
    """Injected faults, and those that did not end as they may."""
    rows = content["summary"].values()
    attempts, failed = (sum(row[key] for row in rows) for key in ("attempts", "failed"))
    told = f"{failed} of {attempts} ended otherwise than promised"
    return told, "0" if failed == 0 else "0 **missed**"


def _span(values: list[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


def _verdict(aim: str, judged: list[Content]) -> str:
    """An aim of several figures, and how many miss it."""
    missed = sum(each["met"] is False for each in judged)
    return f"{aim}, **missed** by {missed} of {len(judged)}" if missed else aim


_TABLE1 = "table1_speedup"
QUESTIONS = (
    Question(
        "Training, model larger than a device: against the best static plan",
        _TABLE1,
        "training",
        against("cap", "best-static"),
    ),
    Question(
        "Training, model that fits: against the best static plan",
        _TABLE1,
        "training",
        against("no-cap", "best-static"),
    ),
    Question("The same against DDP", _TABLE1, "training", against("no-cap", "ddp")),
    Question(
        "The same against DDP with forty lines that freeze and cache",
        _TABLE1,
        "training",
        against("no-cap", "ddp+freeze+cache"),
    ),
    Question(
        "Accuracy: elastic minus static, the demo", "demo_seeds", "training", accuracy
    ),
    Question(
        "Pipeline against `torch.distributed.pipelining`",
        "pipe_throughput",
        "pipeline",
        pipelining,
    ),
    Question(
        "What the engine adds to a step", "engine_overhead", "overhead", engine_step
    ),
    Question(
        "Pause of a transformation, the demo",
        "transition_time",
        "transformations",
        pauses,
    ),
    Question(
        "Killed process: time to the error on all others",
        "failure_time",
        "failures",
        time_to_error,
    ),
    Question("Faults injected into whole runs", "fault_injection", "failures", faults),
    Question(
        "Planner: slowest stage over the optimum",
        "partition_quality",
        "planner",
        quality,
    ),
)
NAMES = tuple(dict.fromkeys(question.name for question in QUESTIONS))
