"""How far what the activation cache serves is from computing it again.

python benchmarks/cache_exactness.py --json benchmarks/results/cache_exactness.json

A row per combination of boundary, form of what crosses it, dtype, rows of one length or
of several, and storage; a value per seed of weights, samples and batches. *same
batches*: found as they were stored. *other batches*: put together from what batches of
another size have stored. *advanced*: found at the lowest boundary. Differences are the
largest of any value, over the largest value of its batch. The status is 1 where one is
beyond its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from autocache.cases import (
    CASES,
    Case,
    Measured,
    Subject,
    advanced,
    hits_of_other_batches,
    hits_of_the_same_batches,
)
from harness.common import (
    Row,
    Target,
    add_common_arguments,
    begin,
    seeds_of,
    write_json,
)
from harness.text import text_table

UNIT = "of the largest value"
# Whether shapes are those of the recomputation.
METRICS: dict[str, tuple[Callable[[Subject], Measured], bool]] = {
    "same batches": (hits_of_the_same_batches, True),
    "other batches": (hits_of_other_batches, False),
    "advanced": (lambda subject: advanced(subject, 1), True),
}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=5)
    args = parser.parse_args(arguments)
    if args.quick:
        args.repeats = 1
    return args


def rows_of(case: Case, seeds: Sequence[int]) -> list[Row]:
    """Return the largest differences of a case, a value per seed."""
    rows = []
    for metric, (measure, same_shape) in METRICS.items():
        if metric == "advanced" and case.boundary == 1:
            continue
        values = tuple(measure(Subject(case, seed)).difference for seed in seeds)
        bound = Target(case.bound(same_shape=same_shape), of="max")
        rows.append(Row(str(case), metric, UNIT, values, target=bound))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the largest difference of each row, alongside its bound."""
    lines = []
    for row in rows:
        assert row.target is not None
        most = max(row.values)
        told = "beyond" if most > row.target.bound else ""
        bound = f"{row.target.bound:.2g}"
        lines.append([row.system, row.metric, f"{most:.2g}", bound, told])
    return text_table(["case", "rows are", "largest", "at most", ""], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    start = begin()
    seeds = seeds_of(args)
    rows = [row for case in CASES for row in rows_of(case, seeds)]
    print(table(rows))
    if args.json is not None:
        write_json(
            args.json,
            "cache_exactness",
            rows,
            [],
            start=start,
            quick=args.quick,
            seed=args.seed,
        )
    met = [row.target.judged({"max": max(row.values)})["met"] for row in rows]  # type: ignore[union-attr]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
