"""The checkpoints that a run writes on its own: by steps, by epochs, at a bad end."""

from __future__ import annotations

import logging
import os
import pathlib

from pipetransformer.checkpoint import content as persistence
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import disk
from pipetransformer.core import tensor_files as files
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.role import Role
from pipetransformer.run.context import Run

_LOG = logging.getLogger(__name__)


class AutoSave:
    """Writes what `CheckpointConfig` asks for; does nothing without a folder.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wanted = run.config.checkpoint
        self._seen_step: int | None = None
        self._before: dict[str, int] = {}
        self._whole: set[checkpoint.Fingerprint] = set()  # files that need no reading
        self._failures = 0  # in a row

    def begin(self, *, lead: bool) -> None:
        """Note the folder's files; the lead makes it, and deletes unfinished ones.

        Raises:
            ValueError: no file can be written there.
            OSError: the folder cannot be read.
        """
        folder = self._wanted.directory
        if folder is None:
            return
        if lead:
            files.make_folder(folder, "CheckpointConfig.directory")
            disk.clear_unfinished(folder)
        if os.access(folder, os.R_OK | os.X_OK):  # another rank's may be missing here
            self._before = checkpoint.times(folder)

    def between_batches(self, role: Role) -> None:
        """Save in the middle of a pass if enough steps have been done; on the lead.

        Not after the last batch of a pass: the epoch's end saves instead, when the
        user's code has seen the pass end.
        """
        is_due = not self._run.state.pass_is_done and self._reached_a_multiple()
        if is_due and role.is_lead:
            self._save(role.active())

    def after_epoch(self, replica: Replica | None) -> None:
        """Save if the epoch or the steps ask for it; on the lead."""
        by_steps = self._reached_a_multiple()
        if by_steps or self._run.state.epoch % self._wanted.every_epochs == 0:
            self._save(replica)

    def _reached_a_multiple(self) -> bool:
        """Tell whether steps since the last call passed a multiple of every_steps."""
        step, every = self._run.state.step, self._wanted.every_steps
        seen, self._seen_step = self._seen_step, step
        if every is None or seen is None:
            return False
        return step // every > seen // every

    def _save(self, replica: Replica | None) -> None:
        run, wanted = self._run, self._wanted
        if wanted.directory is None or not run.is_finite():
            return
        with run.clock.phase("checkpoint"):
            path = checkpoint.path_of_step(wanted.directory, run.state.step)
            try:
                persistence.save(run, replica, path, before=self._before)
            except (OSError, MemoryError) as error:
                self._failures += 1
                if self._failures >= wanted.max_failures:
                    raise
                _LOG.warning(
                    "checkpoint of step %d failed, %d in a row; the next is written "
                    "when it is due, and %d in a row end the run: %s",
                    run.state.step,
                    self._failures,
                    wanted.max_failures,
                    error,
                )
                return
            self._failures = 0
            checkpoint.prune(
                wanted.directory, wanted.keep, saved=path, whole=self._whole
            )

    def in_emergency(self, replica: Replica | None, *, lead: bool) -> None:
        """Save what an active rank still has when the run ends in an error.

        Never in the middle of an optimizer step. Replicas hold the same weights, but
        running statistics are the lead's, so its file takes the place of others. A
        problem is logged and not raised: the error that brought us here matters more.
        """
        run, directory = self._run, self._wanted.directory
        if not directory or not run.state.can_be_saved:
            return
        if run.in_force.plan is None:
            return  # before the first plan there is nothing to lose
        path = checkpoint.path_of_step(directory, run.state.step)
        try:
            # Cells of a backward that broke off may still be running.
            if replica is not None:
                replica.workers.drain()
            if not run.is_finite():
                return
            foreign = path.exists() and not self._is_of_this_run(path)
            if path.exists() and not lead and not foreign:
                return  # the same state, or the lead's
            persistence.save(
                run, replica, path, replace=lead or foreign, before=self._before
            )
        except Exception as problem:
            _LOG.error("emergency checkpoint %s: %s", path, problem)
        else:
            _LOG.warning("emergency checkpoint: %s", path)

    def _is_of_this_run(self, path: pathlib.Path) -> bool:
        try:
            content = checkpoint.read(path)
        except (OSError, ValueError, MemoryError):  # nobody can go on from it now
            return False
        found: bool = content["extra"].get("run_id") == self._run.info.run_id
        return found
