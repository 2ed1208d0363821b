"""Connects a group's members, and tells who kept the others waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from pipetransformer.autodp.backends import Backends, is_absence
from pipetransformer.autodp.plane import SLICE, ControlPlane


class Unreachable(RuntimeError):
    """Others kept this rank waiting for a group: they did not come, or went again.

    Args:
        text: what was expected, and what came.
        members: world ranks that left no address; empty if all did, or it is not known.
    """

    def __init__(self, text: str, members: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.members = tuple(members)


def address_keys(plane: ControlPlane, name: str, rank: int) -> list[str]:
    """Return where gloo, which every group has, leaves a member's addresses."""
    return [f"{name}/{link}/{rank}" for link in range(max(1, len(plane.info.links)))]


class Connecting:
    """One rank's attempt to connect with the other members of a group.

    Args:
        plane: the run's control plane.
        name: the group's.
        members: world ranks in the group's order.
        timeout: deadline of the backends, for the errors' texts.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        members: Sequence[int],
        *,
        timeout: timedelta,
    ) -> None:
        self._plane = plane
        self._what = f"active group '{name}'"
        self._expected = (
            f"ranks {list(members)} to connect within {timeout.total_seconds():.1f} s"
        )
        self._keys = {
            member: address_keys(plane, name, rank)
            for rank, member in enumerate(members)
        }
        # Who was there once is not looked for again: who gives up takes its address
        # away, and did come.
        self._unseen = [member for member in members if member != plane.rank]

    def connect(
        self, build: Callable[[], Backends], given_up: Callable[[], bool]
    ) -> Backends:
        """Build the real backends on a thread: that waits for all members.

        When the run fails, or the group is given up, the thread is left behind. It ends
        by the backend's deadlines, and takes apart what it may still have connected.

        Raises:
            Unreachable: other members did not come in time, or went.
            RuntimeError: this rank could not connect, or came too late.
            PeerFailure: the run failed meanwhile.
        """
        results: list[Backends | Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(build())
            except Exception as error:
                results.append(error)
            done.set()

        threading.Thread(target=run, name=self._what, daemon=True).start()
        try:
            while not done.wait(SLICE.total_seconds()):
                self._plane.check()
                self._look()
                if given_up():
                    raise self._given_up()
            self._plane.check()
            result = results.pop()
            if isinstance(result, Exception):
                raise self._refused(result) from result
        except BaseException:
            self._plane.delete_later(*self._keys[self._plane.rank])
            raise
        return result

    def _given_up(self) -> RuntimeError:
        if not self._has_come(self._plane.rank):
            return RuntimeError(
                f"{self._what}: expected to connect here, got: this rank came too late "
                "for it"
            )
        return self._unreachable("it was given up")

    def _refused(self, error: Exception) -> RuntimeError:
        cause = str(error).split("\n", 1)[0]
        if is_absence(error):
            self._look()
            return self._unreachable(cause)
        return RuntimeError(f"{self._what}: expected to connect here, got: {cause}")

    def _unreachable(self, cause: str) -> Unreachable:
        unseen = self._unseen
        got = f"nothing from ranks {unseen}: {cause}" if unseen else cause
        return Unreachable(
            f"{self._what}: expected {self._expected}, got: {got}", unseen
        )

    def _look(self) -> None:
        self._unseen = [each for each in self._unseen if not self._has_come(each)]

    def _has_come(self, member: int) -> bool:
        return all(self._plane.read(key) is not None for key in self._keys[member])
