"""Tables of the pipeline's benchmarks."""

from __future__ import annotations

from _markdown import Content, markdown, median_and_range, number

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
    return markdown(["us per cell", *columns, "torch's old Pipe, above"], lines)


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
                value_and_range(ratio) if ratio else ABSENT,
                f"{bound:.2f}" if bound else ABSENT,
                f"{ratio['value'] / bound:.0%}" if ratio and bound else ABSENT,
                over_pipelining(system, ratios),
                number(saved["median"]) if saved else ABSENT,
            ]
        )
    headers = ["system", "s", "x one thread", "formula", "share", "x pipelining"]
    return markdown([*headers, "MiB kept"], lines)


def over_pipelining(system: str, ratios: dict[str, Content]) -> str:
    """The cell of a system's speed-up over torch.distributed.pipelining."""
    for name, ratio in ratios.items():
        if name.startswith(f"{system} / pipelining "):
            return f"{ratio['value']:.2f}"
    return ABSENT


def timeline(content: Content) -> list[str]:
    """Each variant of the U-Net ablation beside the published one."""
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


def value_and_range(ratio: Content) -> str:
    """A ratio's cell."""
    return f"{ratio['value']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
