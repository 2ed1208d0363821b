"""Bytes that no rank wrote, under every key of the protocol that a rank reads."""

import re
import threading
import time

import pytest
from torch.distributed import HashStore

from pipetransformer.autodp import PeerFailure, PlanAgreement, announced_epoch
from pipetransformer.autodp.cards import Card, Cards, Job
from pipetransformer.autodp.meeting import Meeting
from pipetransformer.recovery.decision import RankReport
from pipetransformer.run.control_log import ControlLog
from pipetransformer.transformation.measured_inputs import agree_on_profile
from tests.autodp.world import FAST, joined, until
from tests.engine.runs import make_run

ESCAPES = b"\x1b]0;owned\x07\x1b[2J\xff\xfe"
FOREIGN = {
    "nothing": b"",
    "escapes": ESCAPES,
    "5 MB": ESCAPES * 400_000,
    "a number of 64 bits and more": b"9" * 40 + b"\n0\n0",
    "an epoch behind its floor": b"3\n7\n0",
    "negative": b"-5\n-5\n-5",
    "digits of other scripts": "\u0663\n\u0660\n\u0660".encode(),
}
LONGEST = 5_000  # letters of an error
CALL = b"0123456789abcdef" * 2
SAID = CALL + b" "
OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def is_plain(text):
    return 0 < len(text) <= LONGEST and not OBEYED.search(text)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_head_that_no_rank_wrote_is_refused(case):
    with joined() as plane:
        plane.publish("head", FOREIGN[case])
        transition = PlanAgreement(plane, 1, writer=True, participants=[0])
        for reads in (lambda: announced_epoch(plane), lambda: transition.announce(b"")):
            with pytest.raises(RuntimeError, match="head: expected an epoch") as caught:
                reads()
            assert is_plain(str(caught.value))
        plane.delete("head")


@pytest.mark.parametrize("case", FOREIGN)
def test_a_decision_that_no_rank_wrote_is_an_abort(case):
    with joined() as plane:
        transition = PlanAgreement(plane, 1, writer=True, participants=[0])
        transition.announce(b"plan")
        plane.publish("decision/1", FOREIGN[case])
        transition.acknowledge()
        assert not transition.decide()
        assert transition.reason == "" or is_plain(transition.reason)


@pytest.mark.parametrize("case", FOREIGN)
def test_an_answer_that_no_rank_wrote_is_a_refusal(case):
    with joined() as plane:
        transition = PlanAgreement(plane, 1, writer=True, participants=[0, 1])
        transition.announce(b"plan")
        plane.publish("here/1/1", b"")
        plane.publish("ack/1/1", FOREIGN[case])
        transition.acknowledge()
        assert not transition.decide()
        assert transition.refused == [1] and is_plain(transition.reason)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_plan_that_no_rank_wrote_is_refused(case):
    with joined() as plane:
        PlanAgreement(plane, 1, writer=True, participants=[0]).announce(b"plan")
        plane.publish("plan/1", FOREIGN[case])
        reader = PlanAgreement(plane, 1, writer=False, participants=[0])
        with pytest.raises(RuntimeError, match="plan message: expected") as caught:
            reader.receive()
        assert is_plain(str(caught.value))


JSON = {
    "deep": b"[" * 100_000,
    "no object": b"[1]",
    "no kind": b"{}",
    "another kind": b'{"kind": "\\u001b[2J%s"}' % (b"x" * 9000),
    "a kind that is none": b'{"kind": ["epoch"]}',
}


@pytest.mark.parametrize("case", [*FOREIGN, *JSON])
def test_a_message_of_the_lead_that_no_rank_wrote_is_refused(case):
    with joined() as plane:
        plane.publish(plane.own_key("pos/0"), {**FOREIGN, **JSON}[case])
        with pytest.raises(RuntimeError, match="script position 0: exp") as caught:
            ControlLog(plane).follow("epoch")
        assert is_plain(str(caught.value))


def test_a_message_of_the_lead_without_a_field_is_refused_where_it_is_asked_for():
    with joined() as plane:
        plane.publish(plane.own_key("pos/0"), b'{"kind": "epoch"}')
        message = ControlLog(plane).follow("epoch")
        with pytest.raises(RuntimeError, match="position 0: expected the field 'goes'"):
            message["goes"]
        assert message.get("goes") is None and dict(message) == {"kind": "epoch"}


PROFILES = {
    "another kind of field": b'{"profile": 5, "cluster": {}}',
    "no profile within": b'{"profile": "{}", "cluster": "{}"}',
}


@pytest.mark.parametrize("case", [*FOREIGN, *JSON, *PROFILES])
def test_a_profile_that_no_rank_wrote_is_refused(case):
    with joined() as plane:
        plane.publish("profile", {**FOREIGN, **JSON, **PROFILES}[case])
        run = make_run(plane=plane, workload="some")
        refused = (RuntimeError, ValueError, TypeError)
        with pytest.raises(refused, match="profile.*: expected") as caught:
            agree_on_profile(run, lead=False)
        assert is_plain(str(caught.value)) and run.inputs.profile is None


@pytest.mark.parametrize("case", [*FOREIGN, *JSON])
def test_a_standing_that_no_rank_wrote_is_refused(case):
    with pytest.raises(RuntimeError, match="rank report: expected the fields"):
        RankReport.from_bytes({**FOREIGN, **JSON}[case])


class Gathering:
    """A meeting at which one rank is; the others' parts are written here."""

    def __init__(self, world_size=2, *, rank=1, sealed=False, within_s=5.0):
        self.store = HashStore()
        job = Job(world_size, "", "", sealed=sealed)
        cards = Cards(self.store, rank, job, ours=True)
        given_up = threading.Event()
        self.meeting = Meeting(self.store, "m", rank, world_size, FAST, given_up, cards)
        self.within_s = within_s
        self.write("m/call", CALL)

    def attend(self):
        deadline = time.monotonic() + self.within_s
        return self.meeting.attend("", deadline)

    def write(self, key, data):
        self.store.compare_set(key, "", data)  # takes bytes as they are

    def end(self, *said):
        """End it as rank 0 does when all have joined."""
        own = f"m/{CALL.decode()}/1"
        until(lambda: self.store.check([own]))
        mine = bytes(self.store.get(own))
        self.write(END, b"\n".join([b"met", said[0], mine, *said[1:]]))


END = f"m/{CALL.decode()}/end"


@pytest.mark.parametrize("case", FOREIGN)
def test_a_call_that_no_rank_wrote_is_refused(case):
    gathering = Gathering()
    gathering.store.delete_key("m/call")
    gathering.write("m/call", FOREIGN[case] or b"?")
    with pytest.raises(RuntimeError, match="expected a call of 32 digits") as caught:
        gathering.attend()
    assert is_plain(str(caught.value))


@pytest.mark.parametrize("case", FOREIGN)
def test_an_end_of_the_meeting_that_no_rank_wrote_is_refused(case):
    gathering = Gathering()
    comes = threading.Timer(0.5, gathering.write, (END, FOREIGN[case] or b"?"))
    comes.start()
    match = "meeting: expected what 2 ranks have said, got"
    with pytest.raises(RuntimeError, match=match) as caught:
        gathering.attend()
    assert is_plain(str(caught.value))
    comes.join()


@pytest.mark.parametrize("case", FOREIGN)
def test_a_name_of_the_run_that_no_rank_wrote_is_refused(case):
    gathering = Gathering(rank=0)

    def come():
        until(lambda: gathering.store.get("m/call") != CALL)
        call = gathering.store.get("m/call").decode()
        gathering.write(f"m/{call}/1", FOREIGN[case] or b"?")

    comes = threading.Thread(target=come)
    comes.start()
    with pytest.raises(RuntimeError, match="meeting: expected 32 digits") as caught:
        gathering.attend()
    assert is_plain(str(caught.value))
    comes.join()


@pytest.mark.parametrize("case", FOREIGN)
def test_a_beat_before_the_meeting_that_no_rank_wrote_ends_nothing(case):
    gathering = Gathering(3)
    gathering.write(f"m/{CALL.decode()}/hb/{CALL.decode()}", FOREIGN[case] or b"?")
    gathering.write(f"m/{CALL.decode()}/0", SAID + b"\x1b[2J")
    comes = threading.Timer(1.0, gathering.end, (SAID + b"\x1b[2J", SAID))
    comes.start()
    assert gathering.attend()[1] == [" [2J", "", ""]
    comes.join()


@pytest.mark.parametrize("sealed", [False, True])
def test_only_who_has_no_secret_believes_a_card_at_once(sealed):
    gathering = Gathering(sealed=sealed)
    other = Card(Job(3, "", "", sealed=sealed), "elsewhere", 7)
    gathering.write("pt/card/0", other.encode())
    comes = threading.Timer(1.0, gathering.end, (SAID + b"address",))
    comes.start()
    if sealed:
        assert gathering.attend()[1] == ["address", ""]
    else:
        with pytest.raises(PeerFailure, match="the store is another job's"):
            gathering.attend()
    comes.join()


def test_who_has_a_secret_is_told_of_the_other_job_in_the_end():
    gathering = Gathering(sealed=True, within_s=0.5)
    other = Card(Job(3, "", "", sealed=True), "elsewhere", 7)
    gathering.write("pt/card/0", other.encode())
    match = "on this store rank 0 is process 7 on 'elsewhere', a job of 3 ranks"
    with pytest.raises(TimeoutError, match=match):
        gathering.attend()
