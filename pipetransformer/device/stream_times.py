"""What a device did while the host waited for it, by events on its stream."""

from __future__ import annotations

from collections import deque

import torch

_KEPT = 8  # marks: two steps


class StreamTimes:
    """The phases of the work that one thread queues on the current stream of a device.

    A step is queued long before it is done, so the host's own clock tells where the
    host was. An event behind each phase tells when the device was through with it.
    On the host itself there is nothing to know.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._marks: deque[tuple[str, torch.Event]] = deque(maxlen=_KEPT)

    def mark(self, phase: str, device: torch.device | None = None) -> None:
        """Note that what is queued so far ends a phase.

        Args:
            phase: Its name.
            device: Whose current stream it is on; None: that of the mark before.
        """
        device = self._device if device is None else device
        if device is None or device.type in ("cpu", "meta"):
            return
        if device != self._device:  # events of two devices have no time between them
            self._marks.clear()
            self._device = device
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        self._marks.append((phase, event))

    def parts(self, phase: str, began: float, ended: float) -> list[tuple[str, float]]:
        """Divide a wait among the phases that the device was in.

        Args:
            phase: The host has waited for the last mark of this phase.
            began: When the host began to wait, in s.
            ended: When it had waited, on the same clock.

        Returns:
            Phases in order and when each ended; the first began before `began`, or
            what was before it is not known. Empty where nothing is known.
        """
        marks = list(self._marks)
        place = max((i for i, each in enumerate(marks) if each[0] == phase), default=0)
        found: list[tuple[str, float]] = []
        end = ended
        for i in range(place, 0, -1):
            name, event = marks[i]
            found.append((name, end))
            end -= marks[i - 1][1].elapsed_time(event) / 1e3
            if end <= began:
                break
        for _ in range(place):  # told
            self._marks.popleft()
        return found[::-1]
