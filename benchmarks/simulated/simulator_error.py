"""What the simulator's published accuracy says, in words.

Needs nothing but the standard library: the README's tables say it, too.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
# The beginning of a kind of pipeline, and what is said of it.
KINDS = {"compute": "stages that compute", "": "stages that wait"}


def simulator_error(results: Path = RESULTS) -> str:
    """Return the measured error of a simulated step, of each sort of stages.

    Args:
        results: Folder of the result files.
    """
    path = results / "simulator_accuracy.json"
    if not path.exists():
        return "the simulator's error is not measured on this version"
    sizes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for error in json.loads(path.read_text())["errors"]:
        kind = next(each for each in KINDS if error["kind"].startswith(each))
        sizes[kind].append(100 * abs(error["value"]))
    told = [
        f"{what} median {statistics.median(sizes[kind]):.1f} %, worst "
        f"{max(sizes[kind]):.1f} %"
        for kind, what in KINDS.items()
        if sizes[kind]
    ]
    return f"the simulator's measured error of a step, on CPU slots: {'; '.join(told)}"
