"""Two hosts with two processes each: a whole run, an outage, and lost links.

    python -m tests.distributed.two_hosts --json benchmarks/results/two_hosts.json

Runs as root on Linux. What each process says when the link goes, one way or both, and
how long after; and under "continue" which half goes on. The status is 1 if that is not
as promised.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import signal
import sys
import tempfile
import time

from harness.provenance import begin
from harness.results import Row, write_json
from pipetransformer.checkpoint import format as checkpoint
from tests.distributed import host_run, partitions
from tests.distributed.namespaces import TwoHosts, missing
from tests.support.ranks import Ranks

LOCAL_WORLD_SIZE = 2
WORLD_SIZE = 2 * LOCAL_WORLD_SIZE
STEPS = 10  # before something happens to the link
OUTAGE_S = 4.0
HEARTBEAT_TIMEOUT_S = 10.0
ENDLESS = 10_000  # epochs of a run that the lost link ends
DEADLINE_S = 200.0


def undisturbed(hosts, more_steps):
    """No event."""


def outage(hosts, more_steps):
    """The link is down for four seconds."""
    hosts.unplug()
    time.sleep(OUTAGE_S)
    hosts.plug()


def unplugged(hosts, more_steps):
    """The link goes down for good."""
    hosts.unplug()


def swallowed(hosts, more_steps):
    """The link stays up and carries nothing any more."""
    hosts.swallow()


def swallowed_one_way(hosts, more_steps):
    """What host 0 sends does not arrive any more; it hears the other."""
    hosts.swallow((0,))


def outage_then_swallowed(hosts, more_steps):
    """After an outage and some more steps packets vanish."""
    outage(hosts, more_steps)
    more_steps()
    hosts.swallow()


# What happens to the link, and whether the run is to survive it.
CASES = {
    "complete run": (undisturbed, True),
    "outage of 4 s": (outage, True),
    "link cut": (unplugged, False),
    "packets swallowed": (swallowed, False),
    "packets swallowed one way": (swallowed_one_way, False),
}
CONTINUED = {partition.name: partition for partition in partitions.PARTITIONS}


def _steps(folder):
    mark = folder / "step-0"
    return int(mark.read_text() or 0) if mark.exists() else 0


def _await_steps(folder, ranks, count):
    """Wait until rank 0 has done `count` more steps; its end ends the wait."""
    until = _steps(folder) + count
    end = time.monotonic() + DEADLINE_S / 2
    while _steps(folder) < until:
        if time.monotonic() > end or not ranks.processes[0].is_alive():
            raise RuntimeError(f"rank 0: expected {until} steps, got {_steps(folder)}")
        time.sleep(0.02)


def run_case(
    name, disturb, *, survives, epochs=2, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S
):
    """Run one case; return it with an entry for each rank, times from the event on."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(TwoHosts())
        ranks = stack.enter_context(
            Ranks(
                host_run.train,
                WORLD_SIZE,
                hosts.names,
                LOCAL_WORLD_SIZE,
                str(folder),
                epochs if survives else ENDLESS,
                heartbeat_timeout_s,
                timeout_s=DEADLINE_S,
            )
        )
        more_steps = functools.partial(_await_steps, folder, ranks, STEPS)
        more_steps()
        event = time.monotonic()
        disturb(hosts, more_steps)
        results = []
        for rank, (ok, result) in sorted(ranks.outcomes().items()):
            if not ok:
                raise RuntimeError(f"{name}: rank {rank} failed:\n{result}")
            result["ended_after_s"] = result.pop("ended") - event
            results.append(result)
        return {
            "case": name,
            "event": disturb.__doc__,
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "ranks": results,
            "problems": problems_of(results, survives=survives),
            "checkpoints": [
                _step_of_newest(folder / f"host-{n}" / "checkpoints") for n in range(2)
            ],
        }


def problems_of(results, *, survives):
    """Return which ranks did not end as promised under the default policy."""
    wanted = "finished" if survives else "PeerFailure"
    return [
        f"rank {each['rank']}: expected {wanted}, got {each['outcome']}"
        for each in results
        if each["outcome"] != wanted
    ]


def _step_of_newest(folder):
    """Optimizer steps in the newest checkpoint that loads, None without one."""
    found = checkpoint.newest_valid(folder) if folder.exists() else None
    return None if found is None else int(found[1]["progress"]["step"])


def table(cases):
    """Return the rows for people."""
    lines = []
    for case in cases:
        lines.append(f"{case['case']}: checkpoints by host: {case['checkpoints']}")
        for each in case["ranks"]:
            gap = each["longest_gap_s"]
            lines.append(
                f"  host {each['host']} rank {each['rank']} ({each['role']}): "
                f"{each['outcome']} after {each['ended_after_s']:.1f} s, "
                f"{each['steps']} steps"
                + ("" if gap is None else f", longest {gap:.1f} s")
            )
            if each["text"]:
                lines.append(f"    {each['text']}")
        lines += [f"  PROBLEM {problem}" for problem in case.get("problems", ())]
    return "\n".join(lines)


def as_case(partition, trace, reference):
    """Judge a case under "continue", and return it as plain values."""
    at = trace.strikes[0].at
    ranks = []
    for rank in range(WORLD_SIZE):
        outcome = trace.outcome(rank)
        on = trace.lines(rank, "went on")
        ranks.append(
            {
                "rank": rank,
                "host": rank // LOCAL_WORLD_SIZE,
                "role": "active" if trace.lines(rank, "step") else "standby",
                "outcome": outcome["ended"],
                "text": outcome.get("text", ""),
                "ended_after_s": outcome["at"] - at,
                "went_on_after_s": on[0]["at"] - at if on else None,
                "steps": len(trace.lines(rank, "step")),
                "longest_gap_s": None,
            }
        )
    return {
        "case": partition.name,
        "policy": "continue",
        "event": f"what hosts {partition.mute} send does not arrive; healed later",
        "heartbeat_timeout_s": partitions.HEARTBEAT_TIMEOUT_S,
        "ranks": ranks,
        "checkpoints": len(trace.checkpoints),
        "problems": partitions.problems_of(trace, reference),
    }


def rows(cases):
    """Return the seconds from the loss of the link to each rank's end or going on."""
    return [_row_of_half(case) for case in cases if "policy" in case] + [
        Row(
            case["case"],
            "event to PeerFailure",
            "s",
            tuple(each["ended_after_s"] for each in case["ranks"]),
            values_of="ranks of one run",
        )
        for case in cases
        if "policy" not in case and not CASES[case["case"]][1]
    ]


def _row_of_half(case):
    """Return when the half with the store had gone on; the link is whole then."""
    on = [each["went_on_after_s"] for each in case["ranks"]]
    return Row(
        f"{case['case']}, continue",
        "event to going on",
        "s",
        tuple(seconds for seconds in on if seconds is not None),
        values_of="ranks of one run",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    known = [*CASES, *CONTINUED]
    parser.add_argument("--cases", nargs="+", choices=known, default=known)
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"two hosts: {reason}")
    start = begin()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that hosts are removed
    cases = []
    for name in (name for name in arguments.cases if name in CASES):
        disturb, survives = CASES[name]
        cases.append(run_case(name, disturb, survives=survives))
        print(table(cases[-1:]), flush=True)
    wanted = [CONTINUED[name] for name in arguments.cases if name in CONTINUED]
    for found in partitions.run_all(wanted):
        cases.append(as_case(*found))
        print(table(cases[-1:]), flush=True)
    if arguments.json is not None:
        write_json(
            arguments.json,
            "two_hosts",
            rows(cases),
            [],
            start=start,
            quick=False,
            cases=cases,
        )
    return any(case.get("problems") for case in cases)


if __name__ == "__main__":
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    sys.exit(main())
