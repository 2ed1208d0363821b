"""Strikes the process it runs in with a fault, once, at a declared point of a run.

The library knows nothing of it: the worker wraps functions of the library in its own
process, or uses what the user owns (metric, optimizer, model), to know where the run
is.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from faults.case import DOUBLE, MAKING_CACHE, Case, Moment
from faults.outcomes import FSYNCS, LATE, SLOW_DISK, SLOW_S
from faults.places import fill_disk, jump_clock, slow_fsync, without_room
from faults.small_run import Deadlines
from harness.forked import Log, read_log
from pipetransformer import _C, planner
from pipetransformer.autocache import ActivationCache
from pipetransformer.autodp import ActiveGroup, ControlPlane, PlanAgreement, group
from pipetransformer.checkpoint import content as persistence
from pipetransformer.pipe import Pipe

STANDING_BY_S = 0.03
OTHERS_WAIT_S = 0.3  # until the other replicas wait in the all-reduce
BETWEEN_TWO_S = 0.1  # less than the interval of heartbeats
JUMP_S = 3600.0

OWN_SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "woken": signal.SIGSTOP,
    "paused": signal.SIGSTOP,
    "SIGTERM": signal.SIGTERM,
}
STORE_SIGNALS = {
    "store killed": signal.SIGKILL,
    "store stopped": signal.SIGSTOP,
    "store paused": signal.SIGSTOP,
}
SECOND_SIGNALS = {"kill and kill": signal.SIGKILL, "kill and stop": signal.SIGSTOP}


class Planted(RuntimeError):
    """The error that a case plants."""


class Striker:
    """One case's fault in one process.

    Args:
        case: The case.
        moment: When it strikes after its point.
        rank: This process.
        folder: Of the logs and the checkpoints.
        log: Gets a line "strike" before it happens.
        deadlines: Of the engine.
    """

    def __init__(
        self,
        case: Case | None,
        moment: Moment,
        rank: int,
        folder: Path,
        log: Log,
        deadlines: Deadlines,
    ) -> None:
        self.case = case if case is not None and case.rank == rank else None
        self._moment = moment
        self._folder = folder
        self._log = log
        self._deadlines = deadlines
        self._begun = False
        self._change = -1  # plan epoch of the change that goes on
        self._committed = False
        self._epoch: int | None = None
        self.closing = False
        if self.case is not None:
            self._install(self.case)

    def fire(self) -> None:
        """Strike, at the attempt's moment, unless it was done before."""
        if self.case is None or self._begun:
            return
        self._begun = True
        delay_s = self._moment.delay_s
        if self._moment.drifts:
            timer = threading.Timer(delay_s, self._strike, [self.case])
            timer.daemon = True
            timer.start()
            return
        time.sleep(delay_s)
        self._strike(self.case)

    def _strike(self, case: Case) -> None:
        fault = case.fault
        if fault in DOUBLE:
            self._strike_second(case)
            time.sleep(BETWEEN_TWO_S)
            fault = "SIGKILL"
        self._log.write("strike", pid=os.getpid())
        if fault in OWN_SIGNALS:
            os.kill(os.getpid(), OWN_SIGNALS[fault])
        elif fault in STORE_SIGNALS:
            os.kill(int(os.environ["PT_STORE_PID"]), STORE_SIGNALS[fault])
        elif fault in ("slow", "late"):
            late_s = LATE * self._deadlines.protocol
            time.sleep(SLOW_S if fault == "slow" else late_s)
        elif fault in ("clock ahead", "clock behind"):
            jump_clock(JUMP_S if fault == "clock ahead" else -JUMP_S)
        elif fault == "full disk":
            fill_disk(self._folder / "checkpoints")
        elif fault == "slow disk":
            slow_fsync(SLOW_DISK * self._deadlines.heartbeat, times=FSYNCS)
        elif fault in ("user error", "refusal"):
            raise Planted(f"planted {fault}")

    def _strike_second(self, case: Case) -> None:
        rank = case.victims[1]
        begin = read_log(self._folder / f"rank-{rank}.jsonl")[0]
        self._log.write("strike", pid=begin["pid"])
        os.kill(begin["pid"], SECOND_SIGNALS[case.fault])

    # -- what the worker tells it ----------------------------------------------

    def in_epoch(self, epoch: int) -> None:
        """Note the training epoch."""
        self._epoch = epoch

    def at(self, point: str) -> None:
        """Strike if the case is at this point of this epoch."""
        if self.case is not None and self.case.point == point and self._due():
            self.fire()

    def standing_by(self, point: str) -> None:
        """Strike a moment later, when this rank waits for the others."""
        if self.case is not None and self.case.point == point and self._due():
            timer = threading.Timer(STANDING_BY_S, self.fire)
            timer.daemon = True
            timer.start()

    def watch_backward(self, model: nn.Sequential) -> None:
        """Strike in backward, when the other replicas wait in the all-reduce."""
        weight = next(model[-1].parameters())

        def strike(_: Tensor) -> None:
            case = self.case
            if case is None or case.point != "in backward" or self._begun:
                return
            if self._due():
                time.sleep(OTHERS_WAIT_S)
                self.fire()

        weight.register_post_accumulate_grad_hook(strike)  # type: ignore[no-untyped-call]

    def _due(self) -> bool:
        return self.case is not None and self.case.epoch in (None, self._epoch)

    # -- functions of the library ----------------------------------------------

    def _install(self, case: Case) -> None:
        before(PlanAgreement, "announce", self._begin_change)
        before(PlanAgreement, "receive", self._begin_change)
        after(PlanAgreement, "acknowledge", lambda *_: self._in_change("after ack"))
        after(PlanAgreement, "decide", self._decided)
        before(group, "make_backends", lambda *_: self._in_change("in build"))
        before(Pipe, "from_plan", lambda *_: self._in_change("in rewire"))
        before(ActiveGroup, "retire", lambda *_: self._in_change("in retire"))
        before(_C.autodp, "broadcast_tensors", self._moves)
        before(persistence, "save", lambda *_: self.at("at checkpoint"))
        before(ActivationCache, "create", lambda *_: self.at(MAKING_CACHE))
        if case.fault == "no room":
            without_room(ActivationCache, "create", lambda: self._log.write("no cache"))
        before(ActiveGroup, "all_gather_rows", self._gathers)
        before(ControlPlane, "finish", lambda *_: self.at("at finish"))
        before(planner, "profile", lambda *_: self.at("in profile"))

    def _begin_change(self, transition: PlanAgreement, *_: object) -> None:
        self._change, self._committed = transition.epoch, False
        self._in_change("before PREPARE")

    def _decided(self, committed: bool) -> None:
        self._committed = committed
        if committed:
            self._in_change("after COMMIT")

    def _moves(self, *_: object) -> None:
        if self._committed:
            self._in_change("in move")
            self._in_change("in transfer")

    def _gathers(self, *_: object) -> None:
        if self.closing:
            self.at("at pass close")

    def _in_change(self, point: str) -> None:
        case = self.case
        if case is not None and case.point == point and case.change == self._change:
            self.fire()


def before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Make ``owner.name`` run `call` with its arguments first."""
    whole = owner.__dict__[name]
    inner = whole.__func__ if isinstance(whole, (classmethod, staticmethod)) else whole

    @functools.wraps(inner)
    def wrapped(*args: Any, **options: Any) -> Any:
        call(*args)
        return inner(*args, **options)

    kind = type(whole) if inner is not whole else (lambda function: function)
    setattr(owner, name, kind(wrapped))


def after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Make ``owner.name`` give its result to `call` before it returns it."""
    inner = owner.__dict__[name]

    @functools.wraps(inner)
    def wrapped(*args: Any, **options: Any) -> Any:
        result = inner(*args, **options)
        call(result)
        return result

    setattr(owner, name, wrapped)
