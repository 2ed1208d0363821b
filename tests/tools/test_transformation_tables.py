"""What transformations cost and survive, as tables."""

from _transformation_tables import faults

CASES = [
    ("SIGKILL", "2 PeerFailure"),
    ("SIGKILL", "1 finished"),
    ("slow", "3 finished"),
]
KILLS = {
    "cases": 2,
    "attempts": 4,
    "skipped": 0,
    "failed": 1,
    "median_s": 0.5,
    "max_s": 2.0,
    "checkpoints": 3,
    "unnamed": 2,
}
SLOW = {
    "cases": 1,
    "attempts": 1,
    "skipped": 1,
    "failed": 0,
    "median_s": None,
    "max_s": None,
    "checkpoints": 4,
    "unnamed": 0,
}


def test_faults_tell_how_often_survivors_went_on():
    content = {
        "name": "fault_injection",
        "link": "../../benchmarks/results",
        "summary": {"SIGKILL": KILLS, "slow": SLOW},
        "cases": [{"fault": fault, "outcome": text} for fault, text in CASES],
    }
    assert faults(content)[2:] == [
        "| SIGKILL | 2 | 4 | 1 | 1 | 0.50 | 2.00 | 3 | 2 |",
        "| slow | 1 | 1 | 0 | 1 | - | - | 4 | 0 |",
        "| all | 3 | 5 | 1 | 2 | - | - | 7 | 2 |",
        "",
        "1 attempts were left out on this machine. "
        "[All cases](../../benchmarks/results/fault_injection.md).",
    ]
