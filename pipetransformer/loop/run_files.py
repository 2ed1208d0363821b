"""What a run writes about itself while it goes on: its summary and its page."""

from __future__ import annotations

import logging
import pathlib
import time

from pipetransformer.core import disk
from pipetransformer.report import write_page, write_summary
from pipetransformer.run.context import Run
from pipetransformer.transformation import records

_LOG = logging.getLogger(__name__)

SUMMARY = "summary.json"
PAGE = "report.html"


def write_run_files(run: Run) -> None:
    """Write both into `Config.report`, if it is given and this rank leads.

    A problem is logged and not raised: training does not depend on them. What a run
    that is resumed finds there is kept under another name: it tells of itself alone,
    and nothing before its first pass, unless an error ends it there.

    Both are made anew each time, and grow with the run. So in a run of short passes
    they are not written after every pass; at the end of the run always.
    """
    folder = run.config.report
    if folder is None or not run.is_lead:
        return
    history, place = run.history, pathlib.Path(folder)
    told = bool(history.epochs) or not (history.ended is None or history.ended.is_good)
    if run.is_resumed and not told and (place / SUMMARY).exists():
        return
    began = time.perf_counter()
    if history.ended is None and not run.report_throttle.is_due(began):
        return
    records.count(run)
    history.phase_seconds = run.clock.seconds()
    history.total_seconds = sum(history.phase_seconds.values())
    try:
        if run.is_resumed and not run.wrote_report:
            disk.set_aside(place, (SUMMARY, PAGE))
        run.wrote_report = True
        write_summary(history, place / SUMMARY)
        write_page({place.resolve().name or "run": history.to_json()}, place / PAGE)
    except OSError as problem:
        _LOG.warning("the run's report is not written: %s", problem)
    finally:
        run.report_throttle.note(began, time.perf_counter())
