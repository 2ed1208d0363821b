"""A run, or several, as one HTML file: its timeline, its charts, its reasons.

The page needs no network: its data, from summaries alone, are in it.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from pipetransformer.core import disk, text_files
from pipetransformer.core.wire import printable
from pipetransformer.report.ending import Ending
from pipetransformer.report.saved import Saved

_PLACE = "__DATA__"
_DIGITS = 6  # of what is shown
_LONGEST = 200  # letters of what a summary holds, in errors
_MOST_SLOTS = 1 << 16
_NOT_OURS = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)


def page(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of some runs.

    Args:
        runs: Summaries by the runs' names, as ``History.to_json`` gives them.

    Raises:
        ValueError: no run, or something that is no summary.
    """
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    data = {"runs": [run_data(name, summary) for name, summary in runs.items()]}
    text = _json(data)
    template = importlib.resources.files(__package__).joinpath("page.html")
    # Neither an end of the element nor a comment may be in it.
    return template.read_text("utf-8").replace(_PLACE, text.replace("<", "\\u003c"))


def write_page(
    runs: Mapping[str, Mapping[str, Any]], path: str | os.PathLike[str]
) -> None:
    """Write the page of some runs; readable by its owner alone, whole or absent.

    A symbolic link of that name is replaced, and not followed.

    Raises:
        OSError: the file could not be written; names it.
        ValueError: as `page`.
    """
    disk.make_folder(pathlib.Path(path).parent)
    text_files.replace(path, page(runs))


def run_data(name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a run, from its summary.

    Raises:
        ValueError: it is none; the text names what is missing or wrong.
    """
    try:
        found = _run_data(name, summary)
        _json(found)  # it has no NaN
    except _NOT_OURS as e:
        told = printable(str(e), longest=_LONGEST)
        other = "without" if isinstance(e, LookupError) else f"with {type(e).__name__}:"
        raise ValueError(
            f"summary of {name}: expected what report.write_summary wrote, got "
            f"something {other} {told}"
        ) from e
    return found


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _run_data(name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    epochs = [_epoch(each) for each in summary["epochs"]]
    begun = (summary.get("first_plan") or {}).get("step", 0)  # later in a resumed run
    segments = _segments(summary["epochs"], begun)

    def when(step: int) -> float:
        """The time at which so many steps were done."""
        behind = (p["t0"] for p in segments if p["step"] >= step)
        return float(next(behind, segments[-1]["t1"])) if segments else 0.0

    changes = [_change(c, when(c["step"])) for c in summary["transformations"]]
    recoveries = [_recovery(r, when(r["step"])) for r in summary.get("recoveries", ())]
    lasting = [p for p in segments if p["K"]]
    slots = max((p["K"] * p["R"] for p in lasting), default=1)
    saved = summary.get("freezing")
    return {
        "name": name,
        "state": _state(summary),
        "world": summary["world_size"],
        "total_s": _rounded(
            max(
                float(summary["total_seconds"]),
                max((float(p["t1"]) for p in segments), default=0.0),
            )
        ),
        "slots": _checked_slots(max(slots, summary["world_size"])),
        "layers": max(
            (p["cuts"][-1] if p["cuts"] else p["boundary"] + 1 for p in lasting),
            default=1,
        ),
        "first_rate": epochs[0]["rate"] if epochs else None,
        "lost": sum(len(r["lost"]) for r in summary.get("recoveries", ())),
        "epochs": epochs,
        "segments": segments,
        "changes": changes,
        "recoveries": recoveries,
        "refusals": [
            _event(r["epoch"], "not taken", r["transition"]["rule"])
            for r in summary.get("refusals", ())
        ],
        "aborts": [
            _event(a["epoch"], "aborted", a["reason"])
            for a in summary.get("aborted", ())
        ],
        "codecs": [
            _event(c["epoch"], f"codec {c['codec']}", _codec_text(c))
            for c in summary.get("codecs", ())
        ],
        "decisions": [_decision(d) for d in summary.get("decisions", ())],
        "saved": None if saved is None else str(Saved.from_json(saved, "freezing")),
        "phases": sorted(
            ((n, _rounded(s)) for n, s in summary["phase_seconds"].items()),
            key=lambda entry: -entry[1],
        ),
    }


def _state(summary: Mapping[str, Any]) -> str | None:
    """Return whether the run goes on, or how it ended; None where nothing tells."""
    if "ended" not in summary:  # older ones
        return None
    ended = summary["ended"]
    return "running" if ended is None else str(Ending.from_json(ended, "ended"))


def _epoch(epoch: Mapping[str, Any]) -> dict[str, Any]:
    seconds, samples = float(epoch["seconds"]), epoch["samples"]
    asked = epoch["cache_hits"] + epoch["cache_misses"]
    measured, predicted = epoch["measured_step_ns"], epoch["predicted_step_ns"]
    rate = samples / seconds if seconds > 0 else 0.0
    parts = epoch["segments"]
    last = parts[-1] if parts else {}
    fullest = max(last.get("bytes_per_stage") or [0])
    shown = {
        "epoch": epoch["epoch"],
        "rate": rate,
        "predicted_rate": rate * measured / predicted if predicted else None,
        "measured_ms": measured / 1e6,
        "predicted_ms": predicted / 1e6 if predicted else None,
        "pace": epoch.get("pace", 1.0),
        "loss": epoch["train_loss"],
        "units": epoch["num_frozen_layers"],
        "learning_rate": last.get("learning_rate"),
        "hit_share": 100 * epoch["cache_hits"] / asked if asked else None,
        "cache_mb": epoch["cache"].get("bytes", 0) / 1e6,
        "disk_mb": epoch["cache"].get("disk_bytes", 0) / 1e6 or None,
        "memory_mb": fullest / 1e6 or None,
        "limit_mb": last.get("slot_bytes", 0) / 1e6 or None,
    }
    shown = {key: _rounded(value) for key, value in shown.items()}
    metrics = {key: _rounded(value) for key, value in epoch["metrics"].items()}
    return {**shown, "metrics": metrics}


def _segments(epochs: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return the parts of all passes with their place in time.

    Args:
        epochs: Of the run.
        step: Optimizer steps done before the first of them.
    """
    found: list[dict[str, Any]] = []
    ended = 0.0
    for epoch in epochs:
        parts = epoch["segments"]
        at = float(epoch["elapsed_seconds"]) - sum(float(p["seconds"]) for p in parts)
        at = max(at, ended)
        for part in parts:
            begins = max(float(part.get("began_seconds") or at), ended)
            ended = at = begins + float(part["seconds"])
            found.append(
                {
                    "epoch": epoch["epoch"],
                    "t0": _rounded(begins),
                    "t1": _rounded(ended),
                    "step": step,
                    "K": part["num_stages"],
                    "R": part["num_replicas"],
                    "M": part["num_microbatches"],
                    "boundary": part["boundary"],
                    "units": part["num_frozen_layers"],
                    "cuts": part.get("cuts") or None,
                    "schedule": part.get("schedule") or "gpipe",
                }
            )
            step += part["optimizer_steps"]
    return found


def _change(change: Mapping[str, Any], when: float) -> dict[str, Any]:
    priced, before = change.get("transition"), change["from"]
    terms = None
    if priced is not None:
        chosen = "terms_ns" if priced["accepted"] else "anyway_terms_ns"
        terms = sum(priced[chosen].values()) / 1e6
    pause = float(change["pause_seconds"]) + float(
        change["phases"].get("first_step", 0)
    )
    return {
        "epoch": change["epoch"],
        "step": change["step"],
        "t": _rounded(when),
        "from": _shape(before) if before else "-",
        "to": _shape(change["to"]),
        "pause_ms": _rounded(1000 * pause),
        "predicted_ms": _rounded(terms),
        "moved_mb": _rounded(change["moved_bytes"] / 1e6),
        "reason": change["reason"],
    }


def _checked_slots(slots: int) -> int:
    """Return the rows of the picture, which a browser has to draw."""
    if slots > _MOST_SLOTS:
        raise ValueError(f"slots: expected at most {_MOST_SLOTS}, got {slots}")
    return slots


def _recovery(record: Mapping[str, Any], when: float) -> dict[str, Any]:
    pause = 1000 * float(record["pause_seconds"])
    lost = record["lost"]
    what = f"ranks {lost} lost" if lost else "recovered, nobody lost"
    text = f"{what} at step {record['step']}, pause {pause:.0f} ms"
    return {**_event(record["epoch"], "recovered", text), "t": _rounded(when)}


def _event(epoch: int, what: str, text: str) -> dict[str, Any]:
    return {"epoch": epoch, "what": what, "text": text}


def _codec_text(record: Mapping[str, Any]) -> str:
    verdict = "used" if record["passed"] else "not used"
    cosine = record.get("cosine")
    return verdict + (f", cosine {cosine:.6f}" if cosine is not None else "")


def _decision(decision: Mapping[str, Any]) -> dict[str, Any]:
    signals = decision["statistics"]
    return {
        "point": decision["epoch"],
        "step": decision["step"],
        "units": decision["units"],
        "wanted": decision["wanted"],
        "signals": "; ".join(
            f"{key} {_signal(value)}" for key, value in signals.items() if value
        ),
        "why": decision["why"],
    }


def _signal(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_signal(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shape(shape: Mapping[str, Any]) -> str:
    return (
        f"frozen {shape['num_frozen_layers']}, K={shape['num_stages']} "
        f"R={shape['num_replicas']} M={shape['num_microbatches']}"
    )


def _rounded(value: Any) -> Any:
    """Return a number with few digits; None for what is none, as NaN."""
    if value is None or isinstance(value, (int, str)):
        return value
    number = float(value)
    return float(f"{number:.{_DIGITS}g}") if abs(number) < float("inf") else None
