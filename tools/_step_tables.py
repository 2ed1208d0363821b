"""Tables of what the engine adds to a training step."""

from __future__ import annotations

from _markdown import Content, markdown, median_and_range, number

COLUMNS = ("engine", "plain", "above", "again above")
ABSENT = "-"


def steps(content: Content) -> list[str]:
    """Microseconds per step of each case, and where they go, by part."""
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    cases = list(dict.fromkeys(system for system, _ in cells))
    lines = []
    for case in cases:
        target = cells[case, "above"]["target"]
        aim = number(target["at_most"]) if target else ABSENT
        line = [median_and_range(cells[case, column]) for column in COLUMNS]
        lines.append([case, *line, aim])
    return [
        *markdown(["us per step", *COLUMNS, "aim"], lines),
        "",
        "By part, under a profiler: own time above the plain loop's, and calls of "
        "Python functions.",
        "",
        *parts(content),
    ]


def parts(content: Content) -> list[str]:
    """Own time above the plain loop's and calls of a step, by part and case."""
    cases = [case for case, found in content["parts"].items() if found]
    profiles = {case: content["parts"][case] for case in cases}
    names = [
        name for found in profiles.values() for own in found.values() for name in own
    ]
    lines = []
    for part in dict.fromkeys(names):
        line = [part]
        for found in profiles.values():
            line += _cells(found["engine"].get(part), found["plain"].get(part))
        lines.append(line)
    stack = ["frames in files at the first layer"]
    for case in cases:
        found = content["stack"][case]
        stack += [f"{found['frames']} in {len(found['files'])}", ""]
    headers = [text for case in cases for text in (f"{case}, us", "calls")]
    return markdown(["part", *headers], [*lines, stack])


def _cells(engine: Content | None, plain: Content | None) -> list[str]:
    if engine is None:
        return [ABSENT, ABSENT]
    above = engine["us"] - (plain["us"] if plain else 0.0)
    return [f"{above:.0f}", f"{engine['calls']:.0f}"]
