"""Tables of what the simulator and the planner say beside what is measured."""

from __future__ import annotations

from _markdown import Content, markdown, median_and_range


def simulator(content: Content) -> list[str]:
    """Errors of the simulated step by kind of pipeline and way to run it."""
    headers = ["simulated against measured", "pipelines", "cases", "median error"]
    return markdown(
        [*headers, "worst", "bias"],
        [
            [
                each["group"],
                str(each["pipelines"]),
                str(each["cases"]),
                f"{each['median']:.1%}",
                f"{each['worst']:.1%}",
                f"{each['bias']:+.1%}",
            ]
            for each in content["summaries"]
        ],
    )


def microbatches(content: Content) -> list[str]:
    """Step time by K and M, measured and simulated, beside the paper's figure."""
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    batch = content["shape"]["rows"]
    lines = []
    for system, case in content["cases"].items():
        length, count = case["num_stages"], case["num_microbatches"]
        measured = cells[system, "step time"]
        marks = ["best"] if content["best"][str(length)] == count else []
        marks += ["planner"] if content["chosen"][str(length)] == count else []
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
