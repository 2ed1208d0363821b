"""What transformations cost and survive, as tables."""

from _transformation_tables import faults

CASES = [
    ("SIGKILL", "2 PeerFailure"),
    ("SIGKILL", "1 finished"),
    ("slow", "3 finished"),
]
KILLS = {"cases": 2, "failed": 1, "median_s": 0.5, "max_s": 2.0, "checkpoints": 3}
SLOW = {"cases": 1, "failed": 0, "median_s": None, "max_s": None, "checkpoints": 4}


def test_faults_tell_how_often_survivors_went_on():
    content = {
        "name": "fault_injection",
        "summary": {"SIGKILL": KILLS, "slow": SLOW},
        "cases": [{"fault": fault, "outcome": text} for fault, text in CASES],
    }
    assert faults(content)[2:] == [
        "| SIGKILL | 2 | 1 | 1 | 0.50 | 2.00 | 3 |",
        "| slow | 1 | 0 | 1 | - | - | 4 |",
        "| all | 3 | 1 | 2 | - | - | 7 |",
        "",
        "Each case ran once: [all cases](benchmarks/results/fault_injection.md).",
    ]
