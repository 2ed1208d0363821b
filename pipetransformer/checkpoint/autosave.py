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
from pipetransformer.state.state import UnreadableState

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
        self._settled: int | None = None  # the step of the last file, or of none at all
        self._before: dict[str, int] = {}  # of other runs: names and times
        self._own: set[tuple[str, int]] = set()  # of this run: names and times
        self._whole: set[checkpoint.Fingerprint] = set()  # files that need no reading
        self._failures = 0  # in a row
        self._warned_of_weights = False
        self._warned_of_others = False

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

    def at_end(self, replica: Replica | None) -> None:
        """Save what no file has yet at a good end of the run; on the lead.

        That is so where the script leaves the epochs early, or where the last file
        could not be written: what kept it may be over. A run that has taken no step
        writes nothing.
        """
        run = self._run
        is_new = run.state.step not in (self._settled, run.first_step)
        if not is_new or not run.state.can_be_saved:
            return
        self._save(replica)
        if self._failures:
            _LOG.error("step %d, the last one, is in no checkpoint", run.state.step)

    def _reached_a_multiple(self) -> bool:
        """Tell whether steps since the last call passed a multiple of every_steps."""
        step, every = self._run.state.step, self._wanted.every_steps
        seen, self._seen_step = self._seen_step, step
        if every is None or seen is None:
            return False
        return step // every > seen // every

    def _save(self, replica: Replica | None) -> None:
        run, wanted = self._run, self._wanted
        if wanted.directory is None:
            return
        if not run.is_finite():
            self._settled = run.state.step
            if not self._warned_of_weights:
                _LOG.warning(
                    "no checkpoint of step %d, nor of later ones with NaN or Inf among "
                    "the weights that train",
                    run.state.step,
                )
            self._warned_of_weights = True
            return
        with run.clock.phase("checkpoint"):
            path = checkpoint.path_of_step(wanted.directory, run.state.step)
            try:
                self._note_others(path.parent)
                persistence.save(run, replica, path, before=self._before)
            except (OSError, MemoryError, UnreadableState) as error:
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
            self._failures, self._settled = 0, run.state.step
            checkpoint.prune(
                wanted.directory, wanted.keep, saved=path, whole=self._whole
            )
            saved = (kind for kind in self._whole if kind[0] == path.name)
            self._own.update((name, time) for name, *_, time in saved)

    def _note_others(self, folder: pathlib.Path, *, after: str = "") -> None:
        """Note files that other runs have written since this one began; warn once.

        Args:
            folder: The folder.
            after: Files of names up to this one do not matter.

        Raises:
            OSError: the folder could not be read.
        """
        for name, time in checkpoint.times(folder).items():
            is_known = self._before.get(name) == time or (name, time) in self._own
            if is_known or name <= after:
                continue
            writer = _writer_of(folder / name)
            if writer is None or writer == self._run.info.run_id:
                self._own.add((name, time))  # or a torn one, which nobody knows
                continue
            self._before[name] = time
            if not self._warned_of_others:
                _LOG.warning(
                    "checkpoint %s: expected files of this run alone since it began, "
                    "got one of another; runs in one folder delete each other's",
                    folder / name,
                )
            self._warned_of_others = True

    def in_emergency(self, replica: Replica | None, *, lead: bool) -> None:
        """Save what an active rank still has when the run ends in an error.

        Never in the middle of an optimizer step, nor before a checkpoint is loaded
        whole. Replicas hold the same weights, but running statistics are the lead's, so
        its file takes the place of others; not of one that the run went on from, where
        no step was taken since. A problem is logged and not raised: the error that
        brought us here matters more.
        """
        run, directory = self._run, self._wanted.directory
        if not directory or not run.state.can_be_saved:
            return
        if run.in_force.plan is None:
            return  # before the first plan there is nothing to lose
        if run.loaded is not None:
            _LOG.warning("no emergency checkpoint: %s did not load", run.loaded["name"])
            return
        path = checkpoint.path_of_step(directory, run.state.step)
        if run.state.step == run.first_step and path.name in self._before:
            _LOG.warning("no emergency checkpoint: no step was taken since %s", path)
            return
        try:
            # Cells of a backward that broke off may still be running.
            if replica is not None:
                replica.workers.drain()
            if not run.is_finite():
                _LOG.warning(
                    "no emergency checkpoint: NaN or Inf among the weights that train"
                )
                return
            foreign = path.exists() and _writer_of(path) != run.info.run_id
            if path.exists() and not lead and not foreign:
                return  # the same state, or the lead's
            self._note_others(path.parent, after=path.name)
            persistence.save(
                run, replica, path, replace=lead or foreign, before=self._before
            )
        except Exception as problem:
            _LOG.error("emergency checkpoint %s: %s", path, problem)
        else:
            _LOG.warning("emergency checkpoint: %s", path)
            if run.state.pass_is_done:
                _LOG.warning(
                    "all batches of epoch %d are done: a run that goes on from there "
                    "begins with the next epoch, and what the script does behind the "
                    "batches of this one, as an evaluation, does not come again",
                    run.state.epoch,
                )


def _writer_of(path: pathlib.Path) -> str | None:
    """Return the id of the run that wrote a file; None: nobody can read it now."""
    try:
        content = checkpoint.read(path)
    except (OSError, ValueError, MemoryError):
        return None
    return str(content["extra"].get("run_id", ""))
