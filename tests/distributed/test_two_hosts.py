"""Two hosts: an outage of their link is survived, its loss ends both sides or one."""

import copy
import os

import pytest

from tests.distributed import partitions
from tests.distributed.namespaces import NODES, TwoHosts, missing
from tests.distributed.two_hosts import STEPS, outage_then_swallowed, run_case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _hosts():
    """Skip where there can be none; root is to have them with the variable set."""
    reason = missing()
    if reason is None:
        return
    if os.environ.get("FAIL_WITHOUT_DISTRIBUTED") == "1" and os.geteuid() == 0:
        pytest.fail(f"FAIL_WITHOUT_DISTRIBUTED=1, root and {reason}")
    pytest.skip(reason)


def test_outage_is_survived_and_silence_ends_both_hosts_with_a_checkpoint():
    listening = []

    def event(hosts, more_steps):
        """After an outage packets vanish; before it, where does who listen?"""
        listening.extend(hosts.listening(node) for node in NODES)
        outage_then_swallowed(hosts, more_steps)

    case = run_case("both", event, survives=False)
    # The store and a rank's group on the first host, a rank's group on the second.
    hosts = [[each.rpartition(":")[0] for each in host] for host in listening]
    assert [set(each) for each in hosts] == [{TwoHosts.address(n)} for n in NODES]
    assert [len(each) for each in hosts] == [2, 1]
    roles = [each["role"] for each in case["ranks"]]
    assert roles == ["active", "standby", "active", "standby"]
    for each in case["ranks"]:
        assert each["outcome"] == "PeerFailure", each
        assert each["text"].startswith("peer failure: "), each
    assert case["checkpoints"][0] >= 2 * STEPS, "trained on after the outage"


TESTED = {
    partition.name: partition
    for partition in partitions.PARTITIONS
    if partition.name in ("partition, store of its own", "one way, to the store's host")
}


@pytest.fixture(scope="module")
def parted():
    """Cases under "continue", by name."""
    cases = partitions.run_all(list(TESTED.values()))
    return {partition.name: found for partition, *found in cases}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", TESTED)
def test_of_two_halves_one_trains_on_to_the_undisturbed_end(name, parted):
    trace, reference = parted[name]
    assert partitions.problems_of(trace, reference) == []
    stays = partitions.HOSTS[TESTED[name].store_host]
    assert {r: o["ended"] for r in range(4) if (o := trace.outcome(r))} == {
        rank: "finished" if rank in stays else "PeerFailure" for rank in range(4)
    }


def test_a_second_half_that_trains_on_is_told(parted):
    found, reference = parted["partition, store of its own"]
    trace = copy.deepcopy(found)
    made = trace.lines(0, "step")[-3:]
    trace.logs[2][-1:] = [*made, {**trace.outcome(0), "at": trace.logs[2][-1]["at"]}]
    trace.weights[2] = trace.weights[0]
    problems = " ".join(partitions.problems_of(trace, reference))
    assert "expected one half to train on, got [0, 1]" in problems
    assert "rank 2 made 3 steps alone" in problems
    assert "rank 2: expected to end" in problems
