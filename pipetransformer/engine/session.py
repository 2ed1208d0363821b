"""Opens a run on all ranks, and ends it: together, or with one error everywhere."""

from __future__ import annotations

import contextlib
import logging
import os

import torch

from pipetransformer import _C
from pipetransformer.autodp import ControlPlane, PeerFailure, build_group, connect
from pipetransformer.checkpoint import content as persistence
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.loop.coordinator import Coordinator
from pipetransformer.loop.run_files import write_run_files
from pipetransformer.replica.replica import warm_up
from pipetransformer.replica.run_trace import RunTrace
from pipetransformer.report import Ending
from pipetransformer.report.clock import Clock
from pipetransformer.run.arguments import EngineArguments
from pipetransformer.run.context import Run
from pipetransformer.run.slots import compare_devices
from pipetransformer.state.signature import agree, signature_lines, trainable_lines
from pipetransformer.transformation import records

_LOG = logging.getLogger(__name__)


class Session:
    """The time between entering and leaving the engine's ``with`` block.

    Args:
        arguments: What the user asked for.
    """

    def __init__(self, arguments: EngineArguments) -> None:
        self._pid = os.getpid()
        clock = Clock()
        with clock.phase("connect"):
            info, store = connect(arguments.config.autodp)
            self._plane = ControlPlane(store, info, arguments.config.autodp)
        self.ended_well = False  # the run, and the block with it
        self._coordinator: Coordinator | None = None
        self._trace: RunTrace | None = None
        self._exits = contextlib.ExitStack()
        try:
            self.run = Run(arguments, self._plane, clock)
        except BaseException as error:
            self._plane.fail("opening the engine", f"{type(error).__name__}: {error}")
            self._plane.close()
            raise

    def open(self) -> Coordinator:
        """Compare models and configs, warm up, resume.

        Raises:
            ValueError: models or configs differ between ranks, on every rank.
            PeerFailure: a rank died meanwhile.
        """
        with self.run.clock.phase("open"):
            return self._open()

    def _open(self) -> Coordinator:
        run, wanted = self.run, self.run.config.checkpoint
        try:
            self._exits.callback(self._plane.close)
            self._exits.enter_context(self._plane.termination())
            self._exits.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(run.threads_per_stage)
            if run.keeps_freed_memory:
                _C.core.keep_freed_memory()
                self._exits.callback(_C.core.stop_keeping_freed_memory)
            self._announce()
            with self._plane.guard():
                self._compare()
                solo = build_group(
                    self._plane,
                    name="warm-up",
                    members=[run.info.rank],
                    config=run.config.autodp,
                )
                warm_up(solo)
                solo.retire()
            self._coordinator = Coordinator(run)
            self._trace = RunTrace(run)
            lead = self._coordinator.is_lead
            self._coordinator.autosave.begin(lead=lead)
            run.caches.begin()
            if lead and wanted.resume:
                self._resume(self._coordinator, str(wanted.directory))
        except BaseException as error:
            self._plane.fail("opening the engine", f"{type(error).__name__}: {error}")
            if self._trace is not None:
                self._trace.close()
            self._exits.close()
            raise
        return self._coordinator

    def _announce(self) -> None:
        """Log the run's first line, once per node: the ways of nodes may differ."""
        info = self._plane.info
        if info.local_rank != 0:
            return
        name = self.run.config.autodp.run_name
        _LOG.info(
            "run %s: %d ranks, node %d of %d; %s",
            f"'{name}' {info.run_id}" if name else info.run_id,
            info.world_size,
            info.node,
            info.num_nodes,
            info.transport,
        )

    def _compare(self) -> None:
        run = self.run
        lines = [
            *trainable_lines(run.arguments.model),
            *run.config.facts(),
            f"policy {run.policy!r} {run.policy.state_dict()}",
            f"units {run.arguments.unit_ends}",
            f"processes per node {run.info.local_world_size}",
            f"slots of type {run.slots.type}",
        ]
        try:
            agree(self._plane, signature_lines(run.arguments.model, lines))
        except ValueError:
            self._plane.finish()  # every rank refuses: leave together
            raise
        compare_devices(self._plane, run.slots)

    def _resume(self, coordinator: Coordinator, directory: str) -> None:
        found = checkpoint.newest_valid(directory)
        if found is None:
            _LOG.info("nothing to resume from in %s: the run begins anew", directory)
            return
        persistence.restore(coordinator.run, *found)
        _LOG.info("resumed from %s", found[0])

    def close(self, error: BaseException | None) -> None:
        """Leave the run.

        Does nothing in a process that was forked within the block, and nothing the
        second time.

        Args:
            error: What ended the ``with`` block, or None. With an error the peers are
                told, and an active rank writes an emergency checkpoint.

        Raises:
            PeerFailure: a peer failed; in place of the bare error of a collective.
        """
        coordinator = self._coordinator
        if coordinator is None or os.getpid() != self._pid:
            return  # a forked child has no part in the run, and no threads for it
        self._coordinator = None
        ended_by = error
        try:
            with self.run.clock.phase("close"):
                self._end(coordinator, error)
        except BaseException as late:
            ended_by = error or late  # the first of the two
            raise
        finally:
            if self._trace is not None:
                self._trace.close()
            self._tell_last_step(ended_by)
        failure = self._failure_behind(error)
        if failure is not None and failure is not error:
            raise failure from error
        self.ended_well = error is None

    def _tell_last_step(self, error: BaseException | None) -> None:
        """Tell the user of the last step, if that has waited, and of the end."""
        try:
            if self.run.is_lead:
                self.run.tell_step()
        except Exception as late:  # of a device, or the user's own
            if error is None:
                error = late
                raise
            _LOG.error("last step: %s", late)
        finally:
            self._tell_end(error)

    def _tell_end(self, error: BaseException | None) -> None:
        """Complete the history, in the files of the run and for the user."""
        run, history = self.run, self.run.history
        records.count(run)
        history.phase_seconds = run.clock.seconds()
        history.total_seconds = sum(history.phase_seconds.values())
        history.ended = Ending.of(self._failure_behind(error) or error)
        if not self._is_gone_on_without(error):
            write_run_files(run)
        if run.is_lead:
            run.arguments.listeners.end(history)

    def _failure_behind(self, error: BaseException | None) -> PeerFailure | None:
        """Return the failure of a peer that `error` is, or is the bare error of."""
        if isinstance(error, PeerFailure):
            return error
        failure = self._plane.failure
        foreign = failure is not None and failure.rank != self.run.info.rank
        return failure if foreign and isinstance(error, RuntimeError) else None

    def _end(self, coordinator: Coordinator, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._end_badly(coordinator, error)
                return
            try:
                coordinator.finish()
            except BaseException as late:
                self._end_badly(coordinator, late)
                raise
        finally:
            with self._exits:  # what one of them raises keeps the others from nothing
                self._exits.callback(self.run.close)
                self._exits.callback(coordinator.close)  # the last goes first

    def _end_badly(self, coordinator: Coordinator, error: BaseException) -> None:
        if self._plane.failure is None:
            self._plane.fail("user code", f"{type(error).__name__}: {error}")
        failure = self._failure_behind(error)
        if failure is not None:
            # A launcher's SIGTERM may end the process as soon as the block is left.
            _LOG.error("rank %d ends: %s", self.run.info.rank, failure)
        if self._is_gone_on_without(error):
            return  # the others went on from the same state
        coordinator.autosave.in_emergency(coordinator.replica, lead=coordinator.is_lead)

    def _is_gone_on_without(self, error: BaseException | None) -> bool:
        """Tell whether the others have removed this rank, and the run is theirs."""
        layout = self.run.in_force.layout
        alone = layout is not None and layout.active == (self.run.info.rank,)
        fenced = isinstance(error, PeerFailure) and error.phase == "fenced"
        return fenced and not alone
