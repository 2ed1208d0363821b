"""Meetings of ranks that are threads of the test, and what dead ranks leave of them."""

import itertools
import threading
import time
from dataclasses import replace
from datetime import timedelta

from pipetransformer.autodp.cards import Cards, Job
from pipetransformer.autodp.meeting import Meeting
from tests.autodp.world import FAST, until

CONFIG = replace(
    FAST,
    heartbeat_interval=timedelta(seconds=0.05),
    heartbeat_timeout=timedelta(seconds=1),
)
LONG_S = 60.0


DRAWN = [f"{rank:032x}" for rank in range(4)]


def make_meeting(store, rank, world_size, **options):
    job = Job(world_size, "", "", sealed=False)
    cards = Cards(store, rank, job, ours=False)
    given_up = threading.Event()
    return Meeting(store, "m", rank, world_size, CONFIG, given_up, cards, **options)


def attend(store, rank, world_size, results, within_s=LONG_S, **options):
    """Attend, and keep in `results` what comes of it."""
    meeting = make_meeting(store, rank, world_size, **options)
    deadline = time.monotonic() + within_s
    try:
        results[rank] = meeting.attend(f"value {rank}", deadline)
    except (RuntimeError, TimeoutError) as error:
        results[rank] = error


def attended(world_size, ranks, store, within_s=LONG_S):
    """Return what each of `ranks` comes to; they attend side by side."""
    results = {}
    threads = [
        threading.Thread(
            target=attend, args=(store, rank, world_size, results, within_s)
        )
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return results


def called(store):
    """Wait until rank 0 has called; return its call."""
    until(lambda: store.check(["m/call"]))
    return store.get("m/call").decode()


def join_and_die(store, rank, call):
    """Leave what a rank leaves that dies right after it has joined."""
    store.set(f"m/{call}/hb/{DRAWN[rank]}", "0")
    store.set(f"m/{call}/{rank}", f"{DRAWN[rank]} value {rank}")
    if rank == 0:
        store.set("m/call", DRAWN[0])


class Beating:
    """A rank that has joined, and beats until the block ends."""

    def __init__(self, store, rank, call, first=1):
        self.over = threading.Event()
        arguments = store, rank, call, first
        self.thread = threading.Thread(target=self.beat, args=arguments)

    def beat(self, store, rank, call, first):
        join_and_die(store, rank, call)
        for number in itertools.count(first):
            store.set(f"m/{call}/hb/{DRAWN[rank]}", str(number))
            if self.over.wait(0.05):
                break

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
