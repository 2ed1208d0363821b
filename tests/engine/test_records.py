"""What the history keeps of changes of plan can be explained, whatever others say."""

import json
import logging

import pytest

from pipetransformer.explanation import explain_run
from pipetransformer.planner import Plan
from pipetransformer.report import History, PlanShape
from pipetransformer.transformation.phases import Outcome
from pipetransformer.transformation.proposal import Proposal
from pipetransformer.transformation.records import record_abort, record_change
from tests.engine.runs import make_run
from tests.engine.stand_ins import stand_in

SAID = "RuntimeError: \x1b[2Jno\nroom, \ud800" + "K=2, " * 1000
SHOWN = "RuntimeError: \\x1b[2Jno room, \\ud800K=2, K=2"


@pytest.mark.parametrize("committed", [True, False])
def test_a_reason_of_others_is_recorded_as_one_line_that_explain_takes(
    committed, caplog
):
    caplog.set_level(logging.INFO, logger="pipetransformer")
    history = History(world_size=2, seed=0)
    run = make_run(history=history)
    plan = stand_in(
        Plan,
        boundary=0,
        num_stages=1,
        num_replicas=1,
        num_microbatches=1,
        transition=None,
    )
    proposal = stand_in(
        Proposal, plan=plan, plan_epoch=1, frozen_units=0, absent=(), reason=SAID
    )
    outcome = Outcome(committed, proposal, None, {}, "" if committed else SAID)
    if committed:
        before = PlanShape(0, 0, 2, 1, 1)
        record_change(run, outcome, before, 0.1, attempt=0, told=True)
    else:
        record_abort(run, outcome, 0.1, attempt=0, told=True)
    summary = json.loads(json.dumps(history.to_json()))
    assert SHOWN in str(explain_run(summary))
    assert SHOWN in caplog.text and "\x1b" not in caplog.text
