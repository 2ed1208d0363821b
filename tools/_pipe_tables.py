"""Tables of the pipeline's benchmarks."""

from __future__ import annotations

from _markdown import (
    Content,
    markdown,
    marked,
    median_and_range,
    number,
    value_and_range,
)

# What stands in a cell that was not measured.
ABSENT = "-"


def overhead(content: Content) -> list[str]:
    """Microseconds per cell of each system, and above the loop."""
    columns = {
        "forward": "forward_us_per_cell",
        "backward": "backward_us_per_cell",
        "forward above": "forward_overhead_us_per_cell",
        "backward above": "backward_overhead_us_per_cell",
    }
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    lines = []
    for system in dict.fromkeys(system for system, _ in cells):
        line = [median_and_range(cells.get((system, m))) for m in columns.values()]
        old = content["published"].get(system)
        line.append(" and ".join(map(str, old)) if old else ABSENT)
        lines.append([system, *line])
    old_pipe = "Pipe of torch 2.3, above (another machine: size only)"
    return markdown(["us per cell", *columns, old_pipe], lines)


def throughput(content: Content) -> list[str]:
    """Speed-up over one thread of each system, against its formula and its rival."""
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    ratios = {each["name"]: each for each in content["ratios"]}
    lines = []
    for system in dict.fromkeys(system for system, _ in cells):
        ratio = ratios.get(f"{system} / {content['measures'][system]}")
        bound = content["bounds"].get(system)
        saved = cells.get((system, "peak saved"))
        lines.append(
            [
                system,
                number(cells[system, "step time"]["median"]),
                unmarked(ratio) if ratio else ABSENT,
                f"{bound:.2f}" if bound else ABSENT,
                share_of(bound, ratio) if ratio and bound else ABSENT,
                over_pipelining(system, ratios),
                number(saved["median"]) if saved else ABSENT,
            ]
        )
    headers = ["system", "s", "x one thread", "formula", "share", "x pipelining"]
    return markdown([*headers, "MiB kept"], lines)


def unmarked(ratio: Content) -> str:
    """A ratio whose target stands in another column."""
    return value_and_range({**ratio, "met": None})


def share_of(bound: float, ratio: Content) -> str:
    """How much of its formula a speed-up reaches, and whether that is enough."""
    share = f"{ratio['value'] / bound:.0%}"
    if (target := ratio["target"]) is not None:
        share += f", aim {target['at_least'] / bound:.0%}"
    return marked(share, ratio)


def over_pipelining(system: str, ratios: dict[str, Content]) -> str:
    """The cell of a system's speed-up over torch.distributed.pipelining.

    It names the rival's schedule where that is another one.
    """
    for name, ratio in ratios.items():
        rival = name.removeprefix(f"{system} / pipelining ")
        if rival == name:
            continue
        theirs, ours = rival.partition(" ")[0], system.partition(" ")[0]
        other = "" if theirs == ours else f", over its {theirs}"
        return marked(f"{ratio['value']:.2f}{other}", ratio)
    return ABSENT


def timeline(content: Content) -> list[str]:
    """Each variant of the U-Net ablation alongside the published one."""
    cells = {(row["system"], row["metric"]): row for row in content["rows"]}
    ratios = {each["name"]: each for each in content["ratios"]}
    names = [variant["name"] for variant in content["variants"]]
    lines = []
    for k, name in enumerate(names):
        if name in content["not_run"]:
            line = [name, "not run", "not run", "not run"]
        else:
            ratio = ratios.get(f"{name} / {names[0]}")
            seconds, memory = (cells[name, m] for m in ("step time", "peak memory"))
            line = [name, number(content["scale"]["rows"] / seconds["median"])]
            line += [value_and_range(ratio) if ratio else "1.00"]
            line += [number(memory["median"])]
        if k < len(content["published"]):
            old = content["published"][k]
            line += [number(old["samples_per_s"]), f"{old['speedup']:.2f}"]
            line += [number(old["memory_gib"])]
        else:
            line += [ABSENT] * 3
        lines.append(line)
    headers = ["variant", "samples/s", "x baseline", "MiB"]
    return markdown([*headers, "published samples/s", "x", "GiB"], lines)


def models(content: Content) -> list[str]:
    """Each model's speed-up over the plain one of the same batch, and the published."""
    lines = []
    for ratio in content["ratios"]:
        system = ratio["name"].partition(" / ")[0]
        old = content["published"].get(system)
        lines.append(
            [system, value_and_range(ratio), f"{old:.2f}" if old else ABSENT],
        )
    return markdown(["model", "x plain", "published, unequal batches"], lines)
