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
from typing import Any

from _fault_case import Case
from _forked import Log
from torch import Tensor, nn

from pipetransformer import planner
from pipetransformer.autodp import (
    ActiveGroup,
    MessagePlane,
    Transition,
    _binding,
    group,
)
from pipetransformer.pipe import Pipe

SLOW_S = 1.0
STANDING_BY_S = 0.03
OTHERS_WAIT_S = 0.3  # until the other replicas wait in the all-reduce


class Planted(RuntimeError):
    """The error that a case plants."""


class Striker:
    """One case's fault in one process.

    Args:
        case: The case.
        rank: This process.
        log: Gets a line "strike" before it happens.
        late_s: How long a rank sleeps that is to miss the protocol's deadline.
    """

    def __init__(self, case: Case | None, rank: int, log: Log, late_s: float) -> None:
        self.case = case if case is not None and case.rank == rank else None
        self._log = log
        self._late_s = late_s
        self._struck = False
        self._change = -1  # plan epoch of the change that goes on
        self._committed = False
        self._epoch: int | None = None
        self.closing = False
        if self.case is not None:
            self._install(self.case)

    def fire(self) -> None:
        """Strike, unless it was done before."""
        case = self.case
        if case is None or self._struck:
            return
        self._struck = True
        self._log.write("strike", pid=os.getpid())
        fault, store = case.fault, os.environ.get("PT_STORE_PID", "")
        signals = {
            "SIGKILL": (os.getpid(), signal.SIGKILL),
            "SIGSTOP": (os.getpid(), signal.SIGSTOP),
            "paused": (os.getpid(), signal.SIGSTOP),
            "SIGTERM": (os.getpid(), signal.SIGTERM),
            "store killed": (int(store or -1), signal.SIGKILL),
            "store stopped": (int(store or -1), signal.SIGSTOP),
            "store paused": (int(store or -1), signal.SIGSTOP),
        }
        if fault in signals:
            os.kill(*signals[fault])
        elif fault in ("slow", "late"):
            time.sleep(SLOW_S if fault == "slow" else self._late_s)
        else:
            raise Planted(f"planted {fault}")

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
            threading.Timer(STANDING_BY_S, self.fire).start()

    def watch_backward(self, model: nn.Sequential) -> None:
        """Strike in backward, when the other replicas wait in the all-reduce."""
        weight = next(model[-1].parameters())

        def strike(_: Tensor) -> None:
            case = self.case
            if case is None or case.point != "in backward" or self._struck:
                return
            if self._due():
                time.sleep(OTHERS_WAIT_S)
                self.fire()

        weight.register_post_accumulate_grad_hook(strike)  # type: ignore[no-untyped-call]

    def _due(self) -> bool:
        return self.case is not None and self.case.epoch in (None, self._epoch)

    # -- functions of the library ----------------------------------------------

    def _install(self, case: Case) -> None:
        before(Transition, "announce", self._begin_change)
        before(Transition, "receive", self._begin_change)
        after(Transition, "acknowledge", lambda *_: self._in_change("after ack"))
        after(Transition, "decide", self._decided)
        before(group, "make_backend", lambda *_: self._in_change("in build"))
        before(Pipe, "from_plan", lambda *_: self._in_change("in rewire"))
        before(ActiveGroup, "retire", lambda *_: self._in_change("in retire"))
        before(_binding, "broadcast_tensors", self._moves)
        before(ActiveGroup, "all_gather_rows", self._gathers)
        before(MessagePlane, "finish", lambda *_: self.at("at finish"))
        before(planner, "profile", lambda *_: self.at("in profile"))

    def _begin_change(self, transition: Transition, *_: object) -> None:
        self._change, self._committed = transition.epoch, False
        self._in_change("before PREPARE")

    def _decided(self, committed: bool) -> None:
        self._committed = committed
        if committed:
            self._in_change("after COMMIT")

    def _moves(self, *_: object) -> None:
        if self._committed:
            self._in_change("in move")

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
