"""Pieces of an SVG drawing that is readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# Colours by class: on a light page, and on a dark one.
COLORS = {
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#59636e", "#9198a1"),
    "line": ("#8c959f", "#7d8590"),
    "frozen": ("#d1d9e0", "#3d444d"),
    "trained": ("#818b98", "#818b98"),
    "box": ("#e7edf3", "#262c36"),
    "r0": ("#54aeff", "#1f6feb"),
    "r1": ("#4ac26b", "#238636"),
    "r2": ("#e2a03f", "#9e6a03"),
    "r3": ("#c297ff", "#8957e5"),
}
FONT = "font-family: ui-sans-serif, system-ui, sans-serif"


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole file."""
    light, dark = (_rules(page) for page in (0, 1))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>text {{ {FONT}; font-size: 13px }} {light}",
            f"@media (prefers-color-scheme: dark) {{ {dark} }}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _rules(page: int) -> str:
    return " ".join(
        f".{name} {{ fill: {colors[page]} }} .{name}-line {{ stroke: {colors[page]}; "
        "fill: none }"
        for name, colors in COLORS.items()
    )


def text(
    x: float, y: float, content: str, *, style: str = "ink", anchor: str = "start"
) -> str:
    """Words; (x, y) is on the base line."""
    return (
        f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def block(
    x: float, y: float, width: float, height: float, style: str, *, tip: str = ""
) -> str:
    """A filled rectangle, with what it shows where the pointer rests on it."""
    shape = (
        f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" '
        f'height="{height:g}" rx="2"'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def path(steps: str, style: str = "line", width: float = 1.0) -> str:
    """A line."""
    return f'<path class="{style}-line" stroke-width="{width:g}" d="{steps}"/>'
