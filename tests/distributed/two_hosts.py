"""Two hosts with two processes each: a whole run, an outage, and two lost links.

    python -m tests.distributed.two_hosts --json benchmarks/results/two_hosts.json

Runs as root on Linux. What each process says when the link goes, and how long after.
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

from _provenance import begin
from _results import Row, write_json

from pipetransformer import checkpoint
from tests.distributed import host_run
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
}


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
            "checkpoints": [
                _step_of_newest(folder / f"host-{n}" / "checkpoints") for n in range(2)
            ],
        }


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
    return "\n".join(lines)


def rows(cases):
    """Return the seconds from the loss of the link to each rank's end."""
    return [
        Row(
            case["case"],
            "event to PeerFailure",
            "s",
            tuple(each["ended_after_s"] for each in case["ranks"]),
            values_of="ranks of one run",
        )
        for case in cases
        if not CASES[case["case"]][1]
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"two hosts: {reason}")
    start = begin()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that hosts are removed
    cases = []
    for name in arguments.cases:
        disturb, survives = CASES[name]
        cases.append(run_case(name, disturb, survives=survives))
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


if __name__ == "__main__":
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    main()
