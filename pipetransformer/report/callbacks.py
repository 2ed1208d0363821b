"""What a run tells while it goes on: to objects of the user's, on the lead.

``pt.PipeTransformer(..., callbacks=[pt.report.CsvWriter("runs/mine")])``.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import dataclasses
import importlib
import io
import logging
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pipetransformer.core import disk, text_files
from pipetransformer.report.epochs import EpochRecord
from pipetransformer.report.history import History
from pipetransformer.report.transformations import RecoveryRecord, TransformationRecord

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Optimizer steps done, with this one.
        total_steps: Of the run; None if that is not known yet.
        epoch: 0-based.
        loss: Mean over the lead's rows of the last batch; 0 where that is so short that
            the lead's node has none of it.
        learning_rate: Of the first group, for the next step; None where the optimizer
            finds its own.
        seconds_left: Of the run, as the plan will change, from the second pass on; None
            if that is not known.
    """

    step: int
    total_steps: int | None
    epoch: int
    loss: float
    learning_rate: float | None
    seconds_left: float | None = None


class Callback:
    """Is told what a run does; a subclass overrides what it needs.

    Called on the lead alone, which may be another rank after a loss: what is to go on
    then must be on every rank. An exception ends the run as one of the script would.
    Do not touch the engine here.
    """

    def on_step(self, step: StepRecord) -> None:
        """An optimizer step was taken.

        Where one replica trains on devices this is told when the next step begins, or
        before what else comes after it: then its loss is known without a wait.
        """

    def on_epoch(self, record: EpochRecord) -> None:
        """A pass has ended; its evaluations are still to come."""

    def on_evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """An evaluation between two passes gave `metrics`, after pass `epoch`.

        Where a run evaluates several sets each metric comes twice: as ``"loss"``, and
        with the name of its set, as ``"test/loss"``. With the first evaluation of a
        second set those of the first one come again, by its name.
        """

    def on_transformation(self, record: TransformationRecord) -> None:
        """A plan came into force; the first one has no plan before it."""

    def on_failure(self, record: RecoveryRecord) -> None:
        """Ranks were lost, and the run goes on without them."""

    def on_end(self, history: History) -> None:
        """The run has ended, well or with an error."""


class Listeners:
    """The callbacks of a run, called in order.

    Args:
        callbacks: Of the user.

    Raises:
        TypeError: one is no `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for each in callbacks:
            if not isinstance(each, Callback):
                raise TypeError(
                    f"callbacks: expected pt.report.Callback, got {type(each).__name__}"
                )
        self._callbacks = tuple(callbacks)

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return bool(self._callbacks)

    def step(self, step: StepRecord) -> None:
        """Tell of an optimizer step."""
        for each in self._callbacks:
            each.on_step(step)

    def epoch(self, record: EpochRecord) -> None:
        """Tell of a pass."""
        for each in self._callbacks:
            each.on_epoch(record)

    def evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Tell of an evaluation."""
        for each in self._callbacks:
            each.on_evaluation(epoch, dict(metrics))

    def transformation(self, record: TransformationRecord) -> None:
        """Tell of a plan that came into force."""
        for each in self._callbacks:
            each.on_transformation(record)

    def failure(self, record: RecoveryRecord) -> None:
        """Tell of lost ranks."""
        for each in self._callbacks:
            each.on_failure(record)

    def end(self, history: History) -> None:
        """Tell of the run's end: all, whatever one of them raises."""
        with contextlib.ExitStack() as ends:
            for each in reversed(self._callbacks):
                ends.callback(each.on_end, history)


class CsvWriter(Callback):
    """Writes ``epochs.csv`` and ``changes.csv``, whole after each pass and change.

    Where a run is resumed, or another rank leads, rows of before that are in the files
    stay: of passes before the first one that it is told of, and of changes before that
    step; the pass in which a run is resumed has a row of what came after the checkpoint
    alone. A run that begins anew replaces them. What cannot be read or written is
    logged, and tried again with the next row and at the end: training does not depend
    on it.

    Args:
        folder: Where; made when missing. Files are for their owner alone.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        self._epochs: dict[int, dict[str, Any]] = {}
        self._changes: list[dict[str, Any]] = []
        self._first: dict[str, int] = {}  # by column: of the first row of this run
        self._read: set[str] = set()  # files whose rows of before are known
        self._unwritten: set[str] = set()

    def on_epoch(self, record: EpochRecord) -> None:
        """Add a row."""
        shape = dataclasses.asdict(record.shape)
        self._first.setdefault("epoch", record.epoch)
        self._epochs[record.epoch] = {
            "epoch": record.epoch,
            **shape,
            "samples": record.samples,
            "optimizer_steps": record.optimizer_steps,
            "seconds": record.seconds,
            "train_loss": record.train_loss,
            "measured_step_ns": record.measured_step_ns,
            "predicted_step_ns": record.predicted_step_ns,
            "cache_hits": record.cache_hits,
            "cache_misses": record.cache_misses,
        }
        self._write("epochs.csv")

    def on_evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Add columns to the pass's row, named ``eval_...``."""
        # Of a pass that the one before has counted, where it is the first told.
        self._first.setdefault("epoch", epoch + 1)
        row = self._epochs.setdefault(epoch, {"epoch": epoch})
        row.update({f"eval_{name}": value for name, value in metrics.items()})
        self._write("epochs.csv")

    def on_transformation(self, record: TransformationRecord) -> None:
        """Add a row."""
        after = dataclasses.asdict(record.after)
        self._first.setdefault("step", record.step)
        self._changes.append(
            {
                "epoch": record.epoch,
                "step": record.step,
                **after,
                "pause_seconds": record.pause_seconds,
                "moved_bytes": record.moved_bytes,
                "reason": record.reason,
            }
        )
        self._write("changes.csv")

    def on_failure(self, record: RecoveryRecord) -> None:
        """Add a row: the plan without the lost ranks is a change, too."""
        if record.after is None:
            return
        # A change at this step may be a row of the lead before, which was lost.
        self._first.setdefault("step", record.step + 1)
        self._changes.append(
            {
                "epoch": record.epoch,
                "step": record.step,
                **dataclasses.asdict(record.after),
                "pause_seconds": record.pause_seconds,
                "reason": record.what,
            }
        )
        self._write("changes.csv")

    def on_end(self, history: History) -> None:
        """Write what could not be written before."""
        for name in sorted(self._unwritten):
            self._write(name)

    def _know(self, name: str) -> bool:
        """Take in the rows that a file has of before; False: nobody can read it now."""
        if name in self._read:
            return True
        column = "epoch" if name == "epochs.csv" else "step"
        try:
            found = self._there(name, column)
        except OSError as problem:
            _LOG.warning("%s cannot be read: %s", self._folder / name, problem)
            return False
        before = [(at, row) for at, row in found if at < self._first[column]]
        if column == "epoch":
            older = dict(before)
            for epoch, row in self._epochs.items():  # an evaluation adds to one
                older[epoch] = {**older.get(epoch, {}), **row}
            self._epochs = older
        else:
            self._changes = [row for _, row in before] + self._changes
        self._read.add(name)
        return True

    def _there(self, name: str, column: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows of a file that is there, each with a number of its own."""
        try:
            with open(self._folder / name, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            return [(int(row[column]), row) for row in rows if None not in row]
        except (FileNotFoundError, ValueError, LookupError, TypeError, csv.Error):
            return []  # none, or none of ours

    def _write(self, name: str) -> None:
        self._unwritten.add(name)
        if not self._know(name):
            return
        is_of_epochs = name == "epochs.csv"
        rows = list(self._epochs.values()) if is_of_epochs else self._changes
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        try:
            disk.make_folder(self._folder)
            text_files.replace(self._folder / name, text.getvalue())
        except OSError as problem:
            _LOG.warning("%s is not written: %s", self._folder / name, problem)
        else:
            self._unwritten.discard(name)


class _Scalars(Callback, abc.ABC):
    """Tells a run as scalars by optimizer step; where they go is the subclass's."""

    def __init__(self, every_steps: int) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps: expected at least 1, got {every_steps}")
        self._every, self._step = every_steps, 0

    @abc.abstractmethod
    def _add(self, scalars: Mapping[str, float]) -> None: ...

    def on_step(self, step: StepRecord) -> None:
        """Tell loss and learning rate."""
        self._step = step.step
        if step.step % self._every == 0:
            values = {"loss": step.loss, "learning_rate": step.learning_rate}
            self._add({n: value for n, value in values.items() if value is not None})

    def on_epoch(self, record: EpochRecord) -> None:
        """Tell what a pass did."""
        asked = record.cache_hits + record.cache_misses
        self._add(
            {
                "epoch/train_loss": record.train_loss,
                "epoch/samples_per_s": record.samples / max(record.seconds, 1e-9),
                "epoch/step_ms": record.measured_step_ns / 1e6,
                "epoch/predicted_step_ms": record.predicted_step_ns / 1e6,
                "epoch/cache_hit_share": record.cache_hits / asked if asked else 0.0,
            }
        )

    def on_evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Tell the metrics."""
        self._add(_tags(metrics))

    def on_transformation(self, record: TransformationRecord) -> None:
        """Tell the plan's shape and what the change took."""
        self._step = record.step
        self._add(
            {
                "plan/frozen_units": record.after.num_frozen_layers,
                "plan/num_stages": record.after.num_stages,
                "plan/num_replicas": record.after.num_replicas,
                "plan/pause_s": record.pause_seconds,
            }
        )


class TensorBoardWriter(_Scalars):
    """Writes scalars for TensorBoard, by optimizer step.

    The file is made with the first of them, so by the lead alone.

    Args:
        folder: Where event files go.
        every_steps: Losses and learning rates of every that many steps.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], every_steps: int = 10) -> None:
        super().__init__(every_steps)
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ImportError(
                "TensorBoardWriter: expected the package tensorboard, got none; "
                "pip install tensorboard"
            ) from error
        self._module, self._folder = module, os.fspath(folder)
        self._writer: Any = None  # of the lead alone: with the first scalar

    def on_epoch(self, record: EpochRecord) -> None:
        """Write what a pass did, and flush."""
        super().on_epoch(record)
        self._writer.flush()

    def on_evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics, and flush."""
        super().on_evaluation(epoch, metrics)
        self._writer.flush()

    def on_end(self, history: History) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, self._step)


class WandbWriter(_Scalars):
    """Logs to Weights & Biases, by optimizer step.

    The run begins with the first record, so on the lead alone.

    Args:
        every_steps: Losses and learning rates of every that many steps.
        **options: For ``wandb.init``, such as ``project``.

    Raises:
        ImportError: the package wandb is not installed.
    """

    def __init__(self, every_steps: int = 10, **options: Any) -> None:
        super().__init__(every_steps)
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(
                "WandbWriter: expected the package wandb, got none; pip install wandb"
            ) from error
        self._wandb, self._options = wandb, options
        self._handled = sys.exc_info()[1]  # by the script, around this run
        self._run: Any = None

    def on_end(self, history: History) -> None:
        """Finish the run; as a crashed one, if an error ends it."""
        error = sys.exc_info()[1]
        is_good = error is self._handled or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        )
        if self._run is not None:
            self._run.finish(exit_code=0 if is_good else 1)

    def _add(self, scalars: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self._options)
        self._run.log(dict(scalars), step=self._step)


class ProgressBar(Callback):
    """Shows steps done, loss and the time that is left, where output is a terminal.

    From the second pass on that time is what is foreseen: freezing that is known
    beforehand makes later passes shorter.

    Raises:
        ImportError: the package rich is not installed.
    """

    def __init__(self) -> None:
        try:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
            )
        except ImportError as error:
            raise ImportError(
                "ProgressBar: expected the package rich, got none; pip install rich"
            ) from error
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            transient=True,
        )
        self._task: Any = None

    def on_step(self, step: StepRecord) -> None:
        """Move the bar."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", left="")
        self._bar.update(
            self._task,
            completed=step.step,
            total=step.total_steps,
            description=f"epoch {step.epoch}, loss {step.loss:.4f}",
            left=_left(step.seconds_left),
        )

    def on_end(self, history: History) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._bar.stop()


def _tags(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by their tags: once, with their set where all come with it."""
    ends = "/loss"  # which each set has; a user's own metric may have a slash, too
    sets = [name.removesuffix(ends) for name in metrics if name.endswith(ends)]
    for each in sets:
        own = {n: v for n, v in metrics.items() if n.startswith(f"{each}/")}
        if all(name in own or f"{each}/{name}" in own for name in metrics):
            metrics = own
            break
    return {f"evaluation/{name}": value for name, value in metrics.items()}


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{clock} left"
