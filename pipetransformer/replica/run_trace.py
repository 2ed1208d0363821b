"""Notes when cells and phases of a rank run, and writes it down at the run's end."""

from __future__ import annotations

import logging
import pathlib
import time

from pipetransformer.core import disk, text_files
from pipetransformer.pipe.trace import take_cells, trace_cells
from pipetransformer.report import MOST, Timeline
from pipetransformer.run.context import Run

_LOG = logging.getLogger(__name__)


class RunTrace:
    """The trace of one rank, if `Config.trace` asks for it.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._timeline: Timeline | None = None
        if run.config.trace is None:
            return
        self._timeline = Timeline(run.info.rank, time.perf_counter())
        run.clock.sink = self._timeline.add_phase
        trace_cells(MOST)

    def close(self) -> None:
        """Write the file and note nothing more; a problem is logged.

        A resumed run keeps the file that is there under another name.
        """
        if self._timeline is None or self._run.config.trace is None:
            return
        self._timeline.add_cells(*take_cells())
        trace_cells(0)
        self._run.clock.sink = None
        place = pathlib.Path(self._run.config.trace)
        try:
            disk.make_folder(place)
            name = f"trace-{self._run.info.rank}.json"
            if self._goes_on():
                disk.set_aside(place, (name,))
            text_files.write(place / name, self._timeline.to_json() + "\n")
        except OSError as problem:
            _LOG.warning("the run's trace is not written: %s", problem)
        self._timeline = None

    def _goes_on(self) -> bool:
        """Tell whether the run is resumed, or may be: ended before its first plan.

        Of the lead's checkpoint the other ranks hear with that plan.
        """
        run = self._run
        return run.is_resumed or (run.config.checkpoint.resume and run.first_step != 0)
