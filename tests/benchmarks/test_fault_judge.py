"""The judge of injected faults: right runs pass, each planted wrong one fails.

A trace is made up here for every way in which a case may end, under both policies;
then one thing in it is made wrong at a time.
"""

import dataclasses
import math
import re

import pytest
import torch

import fault_injection
from faults.case import KILLS, RETRIED, Case, Kind, Moment
from faults.checks import Attempt, judge
from faults.outcomes import right_blames, right_outcomes
from faults.small_run import Deadlines
from faults.table import cases
from faults.trace import Reference, Saved, Trace

LAST, STRUCK, ENDED = 15, 7, 8.6  # steps; the step before the strike; seconds
IDS = list(range(12))
METRICS = {epoch: {"loss": 1.0 / (epoch + 1)} for epoch in range(3)}
DEADLINES = Deadlines()


def state(value):
    return torch.tensor([value], dtype=torch.float64)


def counted(number, change=0):
    """Return what is counted after a step; `change`: changes of plan at this step."""
    place = {"step": number, "epoch": number // 5, "batch": number % 5}
    return {**place, "frozen_units": number // 5 + change, "scheduler": {"n": number}}


def reference(move_s=0.5):
    return Reference(
        hashes={number: f"h{number}" for number in range(LAST + 1)},
        ids={number: IDS for number in range(1, LAST + 1)},
        metrics=METRICS,
        states={n: [state(n)] for n in range(LAST + 1)},
        counters={n: [counted(n)] for n in range(1, LAST + 1)},
        move_s=dict.fromkeys(range(4), move_s),
    )


def outcome(ended, *, at=ENDED, rank=None, phase="", text="", epochs=()):
    records = [
        {"epoch": e, "samples": 50, "unique_samples": 50, "metrics": dict(METRICS[e])}
        for e in epochs
    ]
    told = {"rank": rank, "phase": phase, "text": text, "lead": False}
    return {
        "kind": "outcome",
        "at": at,
        "ended": ended,
        **told,
        "history": {"epochs": records},
    }


def step_lines(number, rank, drivers, *, at, plan, name):
    place = {"epoch": (number - 1) // 5, "batch": (number - 1) % 5}
    ids = IDS[drivers.index(rank) :: len(drivers)]
    return [
        {"kind": "share", "at": at - 0.1, **place, "plan": plan, "ids": ids},
        {
            "kind": "step",
            "at": at,
            **place,
            "hash": f"{name}{number}",
            "counters": counted(number),
        },
    ]


def change(plan, active, *, at, committed=True, culprits=()):
    told = {"committed": committed, "active": list(active), "culprits": list(culprits)}
    told["owed"] = []
    return {"kind": "change", "at": at, "plan": plan, **told}


def saved(number, name="h"):
    return Saved(number, f"{name}{number}", [state(number)], counted(number))


def files(*steps):
    return {f"step-{n:010d}.pt": saved(n) for n in steps}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case, and what a right run of it leaves.

    Attributes:
        policy: Of the run.
        case: The fault.
        drivers: The ranks that drive a pipeline when it strikes.
        failure: What survivors that end say: rank, phase, text.
        goes_on: The ranks that train to the end.
        finishes: The ranks that come to the end, without training too.
    """

    policy: str
    case: Case
    drivers: tuple
    failure: tuple = (None, "", "")
    goes_on: tuple = ()
    finishes: tuple = ()

    @property
    def name(self):
        return f"{self.policy}, {self.case.name}"

    def trace(self):
        case, ranks = self.case, range(self.case.world_size)
        logs = [self._log(rank) for rank in ranks]
        finished = [*self.goes_on, *self.finishes]
        weights = {
            rank: [state(LAST if rank in self.goes_on else STRUCK)] for rank in finished
        }
        for rank in set(finished) - set(self.drivers):
            weights[rank] = [state(0.0)]
        survive = set(self.drivers) - set(case.gone)
        left = files(5, 10, 15) if self.goes_on else files(5)
        if not self.goes_on and survive and case.fault != "full disk":
            left |= files(STRUCK)
        woken = 9.0 if case.fault == "woken" else math.inf
        return Trace(
            logs=logs,
            errors=[""] * len(logs),
            woken_at=woken,
            checkpoints=left,
            newest=max(left),
            weights=weights,
        )

    def _log(self, rank):
        case = self.case
        lines = [{"kind": "begin", "at": 0.0, "pid": 1}]
        if self.drivers:
            lines.append(change(1, self.drivers, at=0.1))
        lead = rank == min(self.drivers, default=0)
        lines += self._trained(rank, range(1, STRUCK + 1), self.drivers, 0.0, 1)
        if rank in self.drivers:
            lines.append({"kind": "epoch", "at": 0.2, "epoch": 0})
            lines.append({"kind": "epoch end", "at": 5.2, "epoch": 0, "lead": lead})
            lines.append({"kind": "epoch", "at": 5.3, "epoch": 1})
        if rank == case.rank:
            lines += [{"kind": "strike", "at": 7.5, "pid": 1}] * max(
                1, len(case.victims)
            )
            if case.point == "in transfer":
                lines.insert(-1, {"kind": "moving", "at": 7.4})
            if case.fault == "no room":
                lines.append({"kind": "no cache", "at": 7.6})
        if rank not in case.gone:
            lines += self._after(rank)
        return lines

    def _trained(self, rank, numbers, drivers, later, plan):
        name = "r" if plan > 1 else "h"
        return [
            line
            for number in numbers
            if rank in drivers
            for line in step_lines(
                number, rank, drivers, at=number + later, plan=plan, name=name
            )
        ]

    def _after(self, rank):
        case = self.case
        if rank in case.lost:
            own = {
                "user error": outcome("Planted"),
                "full disk": outcome("OSError"),
                "woken": outcome("PeerFailure", at=10.0, rank=rank, phase="fenced"),
                "SIGTERM": outcome("PeerFailure", rank=rank, phase="SIGTERM"),
            }
            return [own[case.fault]]
        if rank not in self.goes_on:
            if rank in self.finishes:
                # A rank that drove until now has its first epoch's record.
                epochs = (0,) if rank in self.drivers else ()
                return [*self._retry(rank), outcome("finished", at=25.0, epochs=epochs)]
            blamed, phase, text = self.failure
            return [outcome("PeerFailure", rank=blamed, phase=phase, text=text)]
        lead = rank == min(self.goes_on)
        plan = 2 if case.fault in (*KILLS, *RETRIED) else 1
        lines = self._retry(rank)
        lines += self._trained(rank, range(STRUCK + 1, LAST + 1), self.goes_on, 1, plan)
        for epoch in (1, 2):
            at = 5 * epoch + 6.2
            lines.append({"kind": "epoch end", "at": at, "epoch": epoch, "lead": lead})
            if epoch < 2:
                lines.append({"kind": "epoch", "at": at, "epoch": epoch + 1})
        return [*lines, outcome("finished", at=25.0, epochs=(0, 1, 2))]

    def _retry(self, rank):
        case = self.case
        if case.fault in KILLS:
            return [change(2, self.goes_on, at=7.8)]
        if case.fault in RETRIED:
            aborted = change(
                2, self.drivers, at=7.7, committed=False, culprits=[case.rank]
            )
            return [aborted, change(3, self.goes_on, at=7.8)]
        return []


BROKEN = (None, "all_reduce", "a peer is gone: Read error")
STORE = (None, "store", "the store is lost")
ALL3, ALL4 = (0, 1, 2), (0, 2)


def silent(rank):
    return rank, "heartbeat", "no heartbeat"


def no_holder(rank):
    return rank, "recovery", "expected a survivor that holds it"


SAMPLES = [
    Sample("raise", Case("in backward", "SIGKILL", "lead", 2), (0, 1), BROKEN),
    Sample("raise", Case("in backward", "SIGKILL", "lead", 3), ALL3, silent(0)),
    Sample("raise", Case("in build", "SIGKILL", "lead", 3), (0,), silent(0)),
    Sample(
        "raise",
        Case("in backward", "SIGTERM", "member", 2),
        (0, 1),
        (1, "SIGTERM", ""),
    ),
    Sample(
        "raise",
        Case("in backward", "user error", "member", 2),
        (0, 1),
        (1, "user code", ""),
    ),
    Sample(
        "raise",
        Case("in backward", "kill and kill", "lead", 4, second="standby"),
        ALL4,
        silent(3),
    ),
    Sample("raise", Case("in transfer", "SIGKILL", "joiner", 3), (0, 1), BROKEN),
    Sample("raise", Case("in backward", "store killed", "store host", 3), ALL3, STORE),
    Sample(
        "raise",
        Case("in backward", "SIGKILL", "lead and store host", 3),
        ALL3,
        (0, "store", ""),
    ),
    Sample(
        "raise",
        Case("at checkpoint", "full disk", "lead", 3),
        ALL3,
        (0, "user code", ""),
    ),
    *(
        sample
        for policy in ("raise", "continue")
        for sample in (
            Sample(
                policy,
                Case("at pass close", "slow", "member", 2),
                (0, 1),
                goes_on=(0, 1),
            ),
            Sample(
                policy, Case("in backward", "starved", "member", 3), ALL3, goes_on=ALL3
            ),
            Sample(
                policy,
                Case("making the cache", "no room", "lead", 4),
                ALL4,
                goes_on=ALL4,
                finishes=(1, 3),
            ),
            Sample(
                policy,
                Case("in build", "refusal", "member", 4),
                ALL4,
                goes_on=(0,),
                finishes=(1, 2, 3),
            ),
            Sample(
                policy,
                Case("in backward", "store paused", "store host", 3),
                ALL3,
                goes_on=ALL3,
            ),
        )
    ),
    Sample(
        "continue",
        Case("in backward", "SIGKILL", "member", 4),
        ALL4,
        goes_on=(0,),
        finishes=(1, 3),
    ),
    Sample(
        "continue",
        Case("in backward", "SIGTERM", "lead", 4),
        ALL4,
        goes_on=(2,),
        finishes=(1, 3),
    ),
    Sample(
        "continue",
        Case("in backward", "woken", "member", 4),
        ALL4,
        goes_on=(0,),
        finishes=(1, 3),
    ),
    Sample(
        "continue",
        Case("at checkpoint", "full disk", "lead", 4),
        ALL4,
        goes_on=(2,),
        finishes=(1, 3),
    ),
    Sample("continue", Case("in build", "SIGKILL", "lead", 3), (0,), no_holder(0)),
    Sample("continue", Case("in profile", "SIGKILL", "lead", 3), (), silent(0)),
    Sample(
        "continue",
        Case("in profile", "SIGKILL", "standby", 4),
        ALL4,
        goes_on=ALL4,
        finishes=(1,),
    ),
    Sample(
        "continue",
        Case("in backward", "kill and kill", "lead", 4, second="member"),
        ALL4,
        no_holder(0),
    ),
    Sample(
        "continue",
        Case("in backward", "store killed", "store host", 4),
        ALL4,
        STORE,
        goes_on=ALL4,
    ),
    Sample("continue", Case("in build", "store killed", "store host", 3), (0,), STORE),
    Sample(
        "continue",
        Case("in backward", "SIGKILL", "lead and store host", 3),
        ALL3,
        (0, "store", ""),
    ),
]
NAMES = [sample.name for sample in SAMPLES]


def problems(sample, trace):
    attempt = Attempt(sample.case, sample.policy, Moment(), DEADLINES, 2.0, trace)
    return judge(attempt, reference()).problems


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_a_run_that_ends_as_it_should_has_no_problem(sample):
    assert problems(sample, sample.trace()) == ()


def test_the_samples_end_in_every_way_that_is_named():
    named = {
        (policy, right)
        for policy in ("raise", "continue")
        for case in cases(policy)
        for right in right_outcomes(case, policy, Moment())
    }
    shown = {
        (sample.policy, right)
        for sample in SAMPLES
        for right in right_outcomes(sample.case, sample.policy, Moment())
    }
    assert named == shown


# -- what may be wrong ---------------------------------------------------------


def outcomes(trace, ended):
    lines = [log[-1] for log in trace.logs if log[-1]["kind"] == "outcome"]
    return [line for line in lines if line["ended"] == ended]


def others_failures(sample, trace):
    """Return what ranks say that the fault did not hit."""
    return [
        trace.logs[rank][-1]
        for rank in trace.ranks
        if rank not in sample.case.lost
        and trace.logs[rank][-1].get("ended") == "PeerFailure"
    ]


def wrong_weights(sample, trace):
    trace.weights[min(trace.weights)][0] += 1e-6


def unlike_replicas(sample, trace):
    trace.weights[max(sample.goes_on)][0] += 1e-12


def no_weights(sample, trace):
    trace.weights.clear()


def shares(trace):
    return [line for log in trace.logs for line in log if line["kind"] == "share"]


def sample_twice(sample, trace):
    shares(trace)[0]["ids"] = [*shares(trace)[0]["ids"], 3]


def sample_missing(sample, trace):
    shares(trace)[-1]["ids"] = shares(trace)[-1]["ids"][1:]


def other_bits(sample, trace):
    for log in trace.logs:
        for line in log:
            if line["kind"] == "step" and (line["epoch"], line["batch"]) == (0, 2):
                line["hash"] = "x"


def other_bits_on_one_rank(sample, trace):
    lines = [line for line in trace.logs[max(sample.goes_on)] if line["kind"] == "step"]
    lines[-1]["hash"] = "x"


def step_twice(sample, trace):
    log = trace.logs[min(sample.drivers)]
    log.insert(-1, next(line for line in log if line["kind"] == "step"))


def no_checkpoint(sample, trace):
    trace.checkpoints.clear()


def no_last_checkpoint(sample, trace):
    trace.checkpoints.popitem()
    trace.newest = max(trace.checkpoints)


def damaged_checkpoint(sample, trace):
    trace.checkpoints["step-0000000005.pt"] = None


def other_checkpoint(sample, trace):
    trace.checkpoints["step-0000000005.pt"] = Saved(5, "x", [state(9.0)], counted(5))


def far_checkpoint(sample, trace):
    name = max(trace.checkpoints)
    step = trace.checkpoints[name].step
    trace.checkpoints[name] = Saved(step, "x", [state(step + 1e-6)], counted(step))


def other_counts(name):
    def plant(sample, trace):
        saved = trace.checkpoints["step-0000000005.pt"]
        saved.counters.update({name: {"n": 4} if name == "scheduler" else 77})

    return plant


def no_count(sample, trace):
    del trace.checkpoints["step-0000000005.pt"].counters["batch"]


def without_a_lead(sample, trace):
    """As a run whose ranks never say that one of them leads, and save nothing."""
    for log in trace.logs:
        for line in log:
            if line["kind"] == "epoch end":
                line["lead"] = False
    trace.checkpoints.clear()
    trace.newest = None


def epoch_without_a_lead(sample, trace):
    for log in trace.logs:
        for line in log:
            if line["kind"] == "epoch end" and line["epoch"] == 1:
                line["lead"] = False
    del trace.checkpoints["step-0000000010.pt"]


def two_leads(sample, trace):
    for rank in sample.goes_on:
        for line in trace.lines(rank, "epoch end"):
            line["lead"] = True


def nothing_to_resume(sample, trace):
    trace.newest = None


def unknown_to_resume(sample, trace):
    trace.newest = "step-0000000099.pt"


def older_is_newest(sample, trace):
    trace.newest = min(trace.checkpoints)


def nobody_blamed(sample, trace):
    for line in others_failures(sample, trace):
        line.update(rank=None, phase="all_reduce", text="it failed")


def wrong_rank_blamed(sample, trace):
    wrong = max(set(trace.ranks) - set(sample.case.victims))
    for line in others_failures(sample, trace):
        line["rank"] = wrong


def wrong_phase(sample, trace):
    for line in others_failures(sample, trace):
        line["phase"] = "profile"


def all_fail(sample, trace):
    """As a run that gives up although ranks hold the state, blaming whom it may."""
    rank = sample.case.victims[0] if sample.case.victims else None
    for log in trace.logs:
        if log[-1].get("ended") == "finished":
            log[-1] = outcome("PeerFailure", rank=rank, phase="heartbeat")
    trace.weights.clear()


def all_finish(sample, trace):
    for line in others_failures(sample, trace):
        line["ended"] = "finished"


def too_late(sample, trace):
    for log in trace.logs:
        for line in log:
            if line["at"] > 7.5:
                line["at"] += 60.0


def one_fails_late(sample, trace):
    others_failures(sample, trace)[-1]["at"] += 60.0


def one_hangs(sample, trace):
    trace.hung[0] = ""


def no_outcome(sample, trace):
    rank = max(set(trace.ranks) - sample.case.gone)
    trace.logs[rank].pop()


def other_error(sample, trace):
    rank = max(set(trace.ranks) - sample.case.gone)
    trace.errors[rank] = "KeyError: 1"


def no_strike(sample, trace):
    for log in trace.logs:
        log[:] = [line for line in log if line["kind"] != "strike"]


def never_ends_when_woken(sample, trace):
    trace.unwoken = frozenset({0})


def finished(trace):
    return outcomes(trace, "finished")


def records(trace):
    return [r for line in finished(trace) for r in line["history"]["epochs"]]


def record_of_too_few(sample, trace):
    records(trace)[0]["unique_samples"] = 49


def record_of_another_epoch(sample, trace):
    records(trace)[0]["metrics"]["loss"] = 0.25


def records_without_metrics(sample, trace):
    for record in records(trace):
        record["metrics"] = {}


def last_record_alone(sample, trace):
    for line in finished(trace):
        line["history"]["epochs"] = line["history"]["epochs"][-1:]


def record_missing(sample, trace):
    records_of = [o["history"]["epochs"] for o in finished(trace)]
    next(found for found in records_of if found).pop()


def always(sample):
    return True


def goes_on(sample):
    return bool(sample.goes_on)


def fails(sample):
    return bool(others_failures(sample, sample.trace()))


def drives(sample):
    return bool(sample.drivers)


def replicas(sample):
    return len(sample.goes_on) > 1


def ends(sample):
    return not sample.goes_on


def lead_lives(sample):
    return goes_on(sample) and 0 not in sample.case.lost


def leaves_its_last(sample):
    return ends(sample) and len(sample.trace().checkpoints) > 1 and drives(sample)


WRONG = [
    (wrong_weights, goes_on, "from those of the undisturbed run"),
    (unlike_replicas, replicas, "other bits than another replica"),
    (no_weights, goes_on, "finished without weights"),
    (sample_twice, drives, "expected samples"),
    (sample_missing, drives, "expected samples"),
    (other_bits, drives, "other bits than in the undisturbed run"),
    (other_bits_on_one_rank, replicas, "other bits|different weights"),
    (step_twice, drives, "done again"),
    (no_checkpoint, drives, "expected a checkpoint of step"),
    (no_last_checkpoint, goes_on, "expected a checkpoint of step 15"),
    (no_last_checkpoint, leaves_its_last, "expected a checkpoint of step 7"),
    (damaged_checkpoint, always, "does not load"),
    (other_checkpoint, always, "not the state of step 5"),
    (far_checkpoint, drives, "from the state of|not the state of"),
    (older_is_newest, goes_on, "resuming takes step 5, expected step 15"),
    (nothing_to_resume, always, "resuming takes step None, expected step"),
    (unknown_to_resume, always, "resuming takes step None, expected step"),
    (without_a_lead, lead_lives, "expected a checkpoint of step 10"),
    (without_a_lead, goes_on, "epochs .0, 1, 2.: expected a lead, got none"),
    (epoch_without_a_lead, lead_lives, "epochs .1.: expected a lead, got none"),
    (epoch_without_a_lead, lead_lives, "expected a checkpoint of step 10"),
    (two_leads, replicas, "epoch 1: expected one lead, got"),
    *(
        (other_counts(name), always, f"step-0000000005.pt: {name} .*, expected one of")
        for name in counted(5)
        if name != "step"
    ),
    (no_count, always, "batch None, expected one of"),
    (nobody_blamed, fails, "blames nobody"),
    (wrong_rank_blamed, fails, "blames rank"),
    (wrong_phase, fails, "phase 'profile'"),
    (all_fail, goes_on, "expected finished, got"),
    (all_finish, ends, "expected PeerFailure, got"),
    (too_late, always, "took .* expected at most|failed after"),
    (one_fails_late, fails, "took .* expected at most|failed after"),
    (one_hangs, always, "hung ranks"),
    (no_outcome, always, "got None"),
    (other_error, always, "KeyError"),
    (no_strike, always, "strikes, got 0"),
    (never_ends_when_woken, always, "did not end when woken"),
    (record_of_too_few, goes_on, "expected each of 50 samples"),
    (record_of_another_epoch, goes_on, "loss 0.25, expected 1.0"),
    (record_missing, goes_on, r"expected the records of \[0"),
    (last_record_alone, goes_on, r"expected the records of \[0, 1, 2\], got \[2\]"),
    (records_without_metrics, goes_on, "loss None, expected 1.0"),
]


@pytest.mark.parametrize(("plant", "applies", "text"), WRONG)
@pytest.mark.parametrize("policy", ["raise", "continue"])
def test_what_is_planted_is_found_under_each_policy_however_it_ends(
    policy, plant, applies, text
):
    concerned = [s for s in SAMPLES if s.policy == policy and applies(s)]
    if text == "expected PeerFailure, got":
        concerned = [s for s in concerned if fails(s)]
    assert concerned, "the fault must be possible"
    for sample in concerned:
        trace = sample.trace()
        plant(sample, trace)
        found = problems(sample, trace)
        assert any(re.search(text, f) for f in found), f"{sample.name}: {found}"


# -- what only some faults can show ---------------------------------------------


def the(fault, policy="continue"):
    return next(s for s in SAMPLES if (s.case.fault, s.policy) == (fault, policy))


def test_a_change_that_is_not_tried_again_without_the_rank_is_found():
    sample = the("refusal")
    for plant, text in (
        (lambda log: log.remove(aborted(log)), "aborted for rank 2"),
        (lambda log: changes(log)[-1].update(active=[0, 2]), "retry without rank 2"),
        (lambda log: changes(log)[-1].update(committed=False), "retry without rank 2"),
        (lambda log: aborted(log).update(culprits=[1]), "aborted for rank 2"),
    ):
        trace = sample.trace()
        plant(trace.logs[0])
        assert any(text in problem for problem in problems(sample, trace)), text


def changes(log):
    return [line for line in log if line["kind"] == "change"]


def aborted(log):
    return next(line for line in changes(log) if not line["committed"])


def test_a_rank_that_trains_on_after_its_removal_is_found():
    sample = the("woken")

    def woken(*numbers, name="h", new=False, ahead=False):
        trace = sample.trace()
        if ahead:  # another rank had completed the step that this one was in
            at = trace.struck_at - 0.01
            trace.logs[0] += step_lines(8, 0, [0, 2], at=at, plan=1, name="h")
            trace.logs[0].sort(key=lambda line: line["at"])
        if new:
            trace.logs[2][:] = [e for e in trace.logs[2] if e["kind"] != "step"]
        for number in numbers:
            lines = step_lines(number, 2, [0, 2], at=9.2, plan=1, name=name)
            trace.logs[2][-1:-1] = lines
        return " ".join(problems(sample, trace))

    assert woken(8) == "", "the one that the others had waited in"
    # One that had just become active was in its first step.
    assert woken(8, new=True) == ""
    assert "made steps [9] after" in woken(9, new=True)
    assert "made steps" not in woken(8, ahead=True)
    assert "made steps [9] after" in woken(9, ahead=True)
    assert "made steps [8, 9] after" in woken(8, 9)
    assert "made steps [9] after" in woken(9)
    assert "other bits" in woken(8, name="r")


def test_a_new_member_that_was_not_told_of_the_pass_does_not_count_as_a_holder():
    """It has the weights, and the run has nobody who could go on."""
    lost = next(s for s in SAMPLES if s.failure == no_holder(0))
    joined = change(2, (0, 1, 2), at=7.45)
    for owed, told, right in (
        ((1, 2), False, True),
        ((1, 2), True, False),
        ((), False, False),
    ):
        trace = lost.trace()
        for rank in (1, 2):
            lines = [{**joined, "owed": list(owed)}]
            lines += [{"kind": "told", "at": 7.46}] if told else []
            trace.logs[rank][-1:-1] = lines
        found = " ".join(problems(lost, trace))
        assert ("no survivor that held" not in found) == right


def test_a_wake_that_came_too_late_to_show_anything_is_no_success():
    sample = the("woken")
    early, late = sample.trace(), sample.trace()
    early.woken_at, late.woken_at = math.inf, 24.9
    assert any("was not removed" in problem for problem in problems(sample, early))
    assert any("got no step" in problem for problem in problems(sample, late))


def test_a_fault_that_did_not_happen_as_it_should_is_no_success():
    transfer, starved = the("SIGKILL", "raise"), the("starved")
    transfer = next(s for s in SAMPLES if s.case.point == "in transfer")
    trace = transfer.trace()
    trace.logs[2].insert(-1, {"kind": "moved", "at": 7.45, "seconds": 0.05})
    assert any("did not go on" in problem for problem in problems(transfer, trace))
    trace = starved.trace()
    trace.logs[1][-1]["at"] = 8.0
    assert any("starved for 0.5 s" in problem for problem in problems(starved, trace))
    trace = the("no room").trace()
    trace.logs[0] = [line for line in trace.logs[0] if line["kind"] != "no cache"]
    assert any("was made" in problem for problem in problems(the("no room"), trace))


@pytest.mark.parametrize(
    ("case", "right"),
    [
        (Case("in backward", "SIGKILL", "member", 4), True),
        (Case("after COMMIT", "SIGKILL", "joiner", 4), True),
        (Case("after ack", "SIGKILL", "member", 4), True),
        (Case("in build", "SIGKILL", "member", 4, between="ahead"), True),
        (Case("in build", "SIGKILL", "member", 4), False),
        (Case("in build", "SIGKILL", "joiner", 4, between="ahead"), False),
        (Case("before PREPARE", "SIGKILL", "standby", 4, between="ahead"), False),
        (Case("in retire", "SIGKILL", "lead", 4), False),
        (Case("in profile", "SIGKILL", "lead", 4), False),
        (Case("at finish", "SIGKILL", "member", 4), False),
        (Case("in build", "kill and kill", "member", 4, second="joiner"), False),
        (Case("in move", "kill and kill", "joiner", 4, second="standby"), True),
        (Case("in backward", "SIGSTOP", "member", 4), False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_nobody_may_be_blamed_only_where_a_collective_is_broken(case, right):
    blames = right_blames(case, case.lost, Moment())
    said = (None, "all_reduce", "a peer is gone: Read error")
    assert any(blame.covers(*said) for blame in blames) == right
    assert any(blame.covers(*silent(case.rank)) for blame in blames)


def test_of_a_lost_store_one_survivor_at_least_must_say_so():
    sample = the("store killed", "raise")
    trace = sample.trace()
    trace.logs[0][-1].update(phase="all_gather", text="a peer is gone: Read error")
    assert problems(sample, trace) == ()
    for log in trace.logs:
        log[-1].update(phase="all_gather", text="a peer is gone: Read error")
    assert problems(sample, trace) == ("nobody says that the store is lost",)


def test_a_stopped_rank_that_ends_well_when_all_is_over_finishes_for_itself_alone():
    sample = Sample("raise", Case("at finish", "SIGSTOP", "member", 3), ALL3, silent(1))
    trace = sample.trace()
    trace.woken_at = 20.0
    trace.logs[1].append(outcome("finished", at=21.0, epochs=(0,)))
    trace.weights[1] = [state(STRUCK)]
    assert problems(sample, trace) == ()


def test_who_joined_where_the_lead_was_lost_may_lack_the_records_before():
    sample = Sample(
        "continue",
        Case("in rewire", "SIGKILL", "lead", 4),
        ALL4,
        goes_on=(2,),
        finishes=(1, 3),
    )
    trace = sample.trace()
    trace.logs[2] = [x for x in trace.logs[2] if x["kind"] != "step" or x["at"] > 7.5]
    trace.logs[2][-1]["history"]["epochs"].pop(0)
    assert not any("records" in problem for problem in problems(sample, trace))
    trace.logs[2][-1]["history"]["epochs"].pop(0)
    assert any("expected the records" in problem for problem in problems(sample, trace))


def test_what_a_change_of_plan_sets_may_be_that_of_before_or_after_it():
    sample = the("slow")
    for units, right in ((1, True), (2, True), (0, False), (3, False)):
        trace = sample.trace()
        trace.checkpoints["step-0000000010.pt"].counters["frozen_units"] = units
        told = dataclasses.replace(reference())
        told.counters[10] = [{**counted(10), "frozen_units": 1}]
        attempt = Attempt(sample.case, "continue", Moment(), DEADLINES, 2.0, trace)
        found = judge(attempt, told).problems
        assert any("frozen_units" in problem for problem in found) != right


def test_an_undisturbed_run_that_is_not_in_order_is_no_reference():
    good = the("slow").trace()
    for log in good.logs:
        log[-1] |= {"first_hash": "h0"}
        log[-1]["history"]["transformations"] = [{"moved_bytes": 9}]
    good.logs[0][-1]["lead"] = True
    found = Reference.of(good, {})
    assert (found.last, found.ids[LAST], found.metrics) == (LAST, IDS, METRICS)
    assert found.counters[5] == [counted(5), counted(5)], "as logged, and as saved"
    assert found.counters[6] == [counted(6)]
    with pytest.raises(ValueError, match="expected 100000000 bytes, got 9"):
        Reference.of(good, {}, large=True)
    good.logs[1][-2]["hash"] = "x"
    good.logs[1] = [line for line in good.logs[1] if line["kind"] != "epoch end"]
    next(x for x in good.logs[1] if x["kind"] == "step")["hash"] = "x"
    with pytest.raises(ValueError, match="replicas differ"):
        Reference.of(good, {})
    good.logs[1].pop()
    with pytest.raises(ValueError, match="rank 1: expected the end"):
        Reference.of(good, {})


# -- the table, and when each attempt strikes -----------------------------------


@pytest.mark.parametrize("policy", ["raise", "continue"])
def test_there_are_enough_cases_each_once_each_with_a_right_outcome(policy):
    found = cases(policy)
    assert len(found) >= 250 and len(set(found)) == len(found)
    assert {case.world_size for case in found} == {2, 3, 4}
    for case in found:
        rights = right_outcomes(case, policy, Moment())
        assert rights and all(right.why for right in rights)
        if len(rights) > 1:  # evidence must tell which of them is right
            assert {right.if_held for right in rights} == {True, False}


def test_a_case_of_unknown_words_or_without_its_second_rank_is_refused():
    with pytest.raises(ValueError, match=r"expected one of .* got 'nowhere'"):
        Case("nowhere", "SIGKILL", "lead", 2)
    with pytest.raises(ValueError, match="expected a second rank"):
        Case("in move", "kill and kill", "lead", 4)


def test_repeated_attempts_strike_within_50_ms_each_at_a_moment_of_its_own():
    case, slow = (
        Case("in move", "SIGKILL", "lead", 4),
        Case("in move", "slow", "lead", 4),
    )
    moments = [fault_injection.moment_of(case, n, "0", reference()) for n in range(20)]
    assert moments[0] == Moment()
    delays = [moment.delay_s for moment in moments[1:]]
    assert len(set(delays)) == 19 and min(delays) > 0 and max(delays) <= 0.05
    assert {moment.drifts for moment in moments} == {True, False}
    assert moments == [
        fault_injection.moment_of(case, n, "0", reference()) for n in range(20)
    ]
    assert not any(
        fault_injection.moment_of(slow, n, "0", reference()).drifts for n in range(9)
    )


def test_without_a_store_the_run_is_compared_with_one_that_freezes_no_further():
    case = Case("in backward", "store killed", "store host", 3)
    kind = fault_injection.reference_kind(case, "continue")
    assert kind == Kind("epochs", 3, stays_at=2) and kind.freezes == (0, 5, 6, 6)
    assert fault_injection.reference_kind(case, "raise").freezes == (0, 5, 6, 0)
