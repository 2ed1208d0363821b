"""How far the free parameters move the ladder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.text import text_table
from simulated.ladder_instance import Rates
from simulated.ladder_rows import Section
from simulated.ladder_steps import Ladder, Rung


def variants(rates: Rates) -> Iterator[tuple[str, Rates]]:
    """Return the rates as they are, and with one of them changed."""
    yield "as chosen", rates
    for name, factor in (("half", 0.5), ("double", 2)):
        for field, told in (
            ("overhead_ns", "overhead"),
            ("block_forward_ns", "forward time"),
            ("device_link_bytes_per_s", "link"),
            ("network_bytes_per_s", "network"),
            ("cache_bytes_per_s", "cache rate"),
        ):
            changed = round(getattr(rates, field) * factor)
            yield f"{name} the {told}", replace(rates, **{field: changed})
    yield "overlapped copies", replace(rates, copies="overlapped")


def table(section: Section, rungs: Sequence[Rung], rates: Rates) -> str:
    """Return the speed-ups of some rungs under each variant."""
    lines = []
    for name, changed in variants(rates):
        ladder = Ladder(section.instance, changed)
        base = ladder.total_ns(section.baseline)
        lines.append([name, *(f"{base / ladder.total_ns(r):.2f}" for r in rungs)])
    return text_table(["simulated", *(rung.name for rung in rungs)], lines)
