"""Tables of what the simulator and the planner say alongside what is measured."""

from __future__ import annotations

from _markdown import Content, markdown, marked, median_and_range, value_and_range


def simulator(content: Content) -> list[str]:
    """Errors of the simulated step by kind of pipeline and way to run it."""
    judged = {(row["system"], row["metric"]): row for row in content["rows"]}
    headers = ["simulated against measured", "pipelines", "cases", "median error"]
    lines = []
    for each in content["summaries"]:
        median, worst = (
            marked(f"{each[name]:.1%}", judged.get((each["group"], metric), {}))
            for name, metric in (("median", "median error"), ("worst", "worst error"))
        )
        counts = [str(each["pipelines"]), str(each["cases"])]
        lines.append([each["group"], *counts, median, worst, f"{each['bias']:+.1%}"])
    return markdown([*headers, "worst", "bias"], lines)


def microbatches(content: Content) -> list[str]:
    """Step time by K and M, measured and simulated, alongside the paper's figure."""
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    ratios = {ratio["name"].partition(":")[0]: ratio for ratio in content["ratios"]}
    batch = content["shape"]["rows"]
    lines = []
    for system, case in content["cases"].items():
        length, count = case["num_stages"], case["num_microbatches"]
        measured = cells[system, "step time"]
        marks = ["best"] if content["best"][str(length)] == count else []
        if content["chosen"][str(length)] == count:
            ratio = ratios[f"K={length}"]
            marks.append(f"planner: {value_and_range(ratio)} of the best")
        lines.append(
            [
                f"K={length} M={count}",
                median_and_range(measured),
                median_and_range(cells[system, "simulated"]),
                f"{batch / measured['median']:.1f}",
                str(content["published"]["samples_per_s"][str(count // length)]),
                ", ".join(marks),
            ]
        )
    headers = ["", "step (s)", "simulated (s)", "samples/s"]
    return markdown([*headers, "published, K=8, same M/K", ""], lines)
