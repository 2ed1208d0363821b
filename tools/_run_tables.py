"""Tables of whole fine-tuning runs: table1_speedup and fig10_alpha."""

from __future__ import annotations

from _markdown import Content, markdown, median_and_range


def table1(content: Content) -> list[str]:
    """Wall time and speed-up over static-pipe of each system, in each setting."""
    settings = list(content["settings"])
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    speedups = {each["name"]: each for each in content["ratios"]}
    headers = ["system"]
    for setting in settings:
        headers += [f"{setting}: seconds", "x static-pipe"]
    lines = []
    for system in dict.fromkeys(system for system, _ in cells):
        line = [system]
        for setting in settings:
            row = cells.get((system, f"{setting} wall time"))
            ratio = speedups.get(f"{setting} {system} / static-pipe")
            own = "1.00" if system == "static-pipe" else "-"
            absent = content["settings"][setting]["does_not_fit"]
            missing = "does not fit" if system in absent else "not run"
            line.append(median_and_range(row) if row else missing)
            line.append(f"{ratio['value']:.2f}" if ratio else own)
        lines.append(line)
    return markdown(headers, lines)


def bounds(content: Content) -> list[str]:
    """Speed-up of the whole system over each rival, against its bound."""
    speedups = {each["name"]: each for each in content["ratios"]}
    lines = []
    for setting, sections in content["settings"].items():
        for rival, bound in sections["bounds"].items():
            ratio = speedups.get(f"{setting} full / {rival}")
            if ratio is None:
                continue
            value, low, high = (ratio[key] for key in ("value", "min", "max"))
            told = f"{value:.2f} ({low:.2f} to {high:.2f})"
            share = f"{value / bound:.0%}"
            lines.append([f"full over {rival}, {setting}", told, f"{bound:.2f}", share])
    return markdown(["ratio", "measured", "work bound", "share"], lines)


def accuracy(content: Content) -> list[str]:
    """Speed-up and paired accuracy of each freezing pace against unfrozen."""
    speedups = {each["name"]: each for each in content["ratios"]}
    lines = []
    for system, test in content["accuracy"].items():
        ratio = speedups[f"{system} / unfrozen"]
        differences = ", ".join(f"{each:+.2f}" for each in test["differences"])
        limit = f"{test['lower_limit']:+.2f}"
        lines.append(
            [
                system,
                f"{ratio['value']:.2f}",
                differences,
                f"{test['mean']:+.2f}",
                f"{limit} ({'passes' if test['passes'] else 'fails'})",
            ]
        )
    headers = ["system", "x unfrozen", "points by seed", "mean", "95 % lower limit"]
    return markdown(headers, lines)
