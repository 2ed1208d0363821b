"""The plan message: read back as written, refused when it is not what was written."""

import dataclasses
import json

import pytest

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import Prospect, TierRates, decide
from pipetransformer.planner import Plan
from pipetransformer.run.layout import Layout
from pipetransformer.transformation.proposal import Proposal

RATES = TierRates(bytes_per_s=10, record_ns=1, write_bytes_per_s=10, write_record_ns=1)
PROSPECT = Prospect(
    boundary=2, prefix_ns=1e9, record_bytes=3, held=48, samples=50, passes=3
)
PROPOSAL = Proposal(
    plan_epoch=3,
    plan=Plan(
        boundary=2,
        num_stages=2,
        num_replicas=2,
        num_microbatches=4,
        samples_per_microbatch=1,
        global_batch=8,
        cuts=(2, 4, 6),
        prefix="replicated",
        cache="host",
    ),
    layout=Layout((0, 2), (0, 0)),
    progress={"step": 7, "epoch": 1},
    policy={"decided": [1, 2]},
    frozen_units=2,
    seed=5,
    reason="Schedule freezes units: 0 to 2",
    pauses={"move": {"count": 1}},
    cache_slots=48,
    admission=decide(RATES, PROSPECT),
    source=2,
    receivers=(0,),
    absent=(1,),
    operations=9,
    position=4,
    group="g/3",
    ahead=True,
)


def signed(content):
    text = json.dumps(content).encode()
    return text + f"#{hash_bytes(text):016x}".encode()


def test_every_field_is_read_back():
    defaults = {
        entry.name: entry.default
        for entry in dataclasses.fields(Proposal)
        if entry.default is not dataclasses.MISSING
    }
    assert all(getattr(PROPOSAL, name) != value for name, value in defaults.items())
    assert Proposal.from_bytes(PROPOSAL.to_bytes()) == PROPOSAL


def test_any_changed_or_missing_byte_is_refused():
    data = PROPOSAL.to_bytes()
    damaged = [data[:n] for n in (0, 1, len(data) // 2, len(data) - 1)]
    for at in range(0, len(data), 7):
        damaged.append(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        damaged.append(data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :])
    text = "plan message: expected its own hash, got another one"
    for message in damaged:
        with pytest.raises(RuntimeError, match=text):
            Proposal.from_bytes(message)


def test_another_version_is_refused():
    content = json.loads(PROPOSAL.to_bytes().rpartition(b"#")[0])
    assert Proposal.from_bytes(signed(content)) == PROPOSAL
    content["version"] += 1
    text = r"plan message: expected version (\d+), got \d+"
    with pytest.raises(RuntimeError, match=text):
        Proposal.from_bytes(signed(content))
