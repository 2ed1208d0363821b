"""What the ladder's script prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.text import text_table
from simulated.ladder_forms import EXPECTED
from simulated.ladder_instance import Rates
from simulated.ladder_rows import Section
from simulated.ladder_steps import Ladder

TOLERANCE = 0.05


@dataclass(frozen=True)
class Told:
    """A row of the table.

    Attributes:
        section: Title of its instance and baseline.
        name: Of its configuration.
        simulated: Speed-up over the section's baseline.
        expected: Worked out beforehand; None: nothing was.
        paper: Measured by the paper; None: nothing was.
        note: What explains a difference; empty: nothing does.
    """

    section: str
    name: str
    simulated: float
    expected: float | None
    paper: float | None
    note: str

    @property
    def off(self) -> float:
        """Relative difference from what was expected; 0 where nothing was."""
        return self.simulated / self.expected - 1 if self.expected else 0.0

    @property
    def explained(self) -> bool:
        """Whether it is close to what was expected, or has a note."""
        return abs(self.off) <= TOLERANCE or bool(self.note)


def print_table(told: Sequence[Told], error: str) -> None:
    """Print the rows by section, and the notes."""
    for title in dict.fromkeys(row.section for row in told):
        rows = [row for row in told if row.section == title]
        print(f"\nsimulated speed-up, {title} ({error})")
        lines = [
            [
                row.name,
                f"{row.simulated:.2f}",
                f"{row.expected:.2f}" if row.expected else "-",
                f"{round(100 * row.off, 1) + 0.0:+.1f} %" if row.expected else "-",
                f"{row.paper:.2f}" if row.paper else "-",
            ]
            for row in rows
        ]
        headers = ["configuration", "simulated", "expected", "off", "paper"]
        print(text_table(headers, lines))
        for row in rows:
            if row.note:
                print(f"* {row.name}: {row.note}.")


def print_given(rates: Rates, forms: Mapping[str, float]) -> None:
    """Print the free parameters and the closed forms."""
    print("\nfree parameters, chosen once:")
    print(
        f"  half a block's overhead per micro-batch: {rates.overhead_ns / 1e3:.0f} us"
    )
    print(f"  a block's forward, 25 samples: {rates.block_forward_ns / 1e6:.0f} ms")
    print(f"  cache of a node: {rates.cache_bytes_per_s / 1e9:.1f} GB/s")
    print(f"  copies between stages: {rates.copies}")
    print("of the paper's cluster:")
    for name in ("device_link_bytes_per_s", "network_bytes_per_s"):
        print(f"  {name}: {getattr(rates, name) / 1e9:.3f} GB/s")
    print("pauses of transformations: not counted")
    print("\nby formula, N=16, no overhead and free links:")
    for name, value in forms.items():
        alongside = f" (expected {EXPECTED[name]})" if name in EXPECTED else ""
        print(f"  {name}: {value:.2f}{alongside}")


def print_epochs(section: Section, ladder: Ladder) -> None:
    """Print what each rung runs at each epoch."""
    for rung in section.rungs:
        print(f"\n{section.system(rung)}")
        lines = [
            [
                str(epoch.frozen_blocks),
                f"{epoch.num_stages} x {epoch.num_replicas} x {epoch.num_microbatches}",
                epoch.schedule,
                f"{epoch.time_ns / 1e6:.1f}",
            ]
            for epoch in ladder.epochs(rung)
        ]
        print(text_table(["frozen", "K x R x M", "schedule", "ms"], lines))
