"""Runs on simulated hosts; they train the demo's model, found by its plain name."""

import sys
from pathlib import Path

for folder in ("examples", "benchmarks"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))
