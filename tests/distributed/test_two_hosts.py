"""Two hosts: an outage of their link is survived, its loss ends both sides."""

import pytest

from tests.distributed.namespaces import missing
from tests.distributed.two_hosts import STEPS, outage_then_swallowed, run_case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_outage_is_survived_and_silence_ends_both_hosts_with_a_checkpoint():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    case = run_case("both", outage_then_swallowed, survives=False)
    roles = [each["role"] for each in case["ranks"]]
    assert roles == ["active", "standby", "active", "standby"]
    for each in case["ranks"]:
        assert each["outcome"] == "PeerFailure", each
        assert each["text"].startswith("peer failure: "), each
    assert case["checkpoints"][0] >= 2 * STEPS, "trained on after the outage"
