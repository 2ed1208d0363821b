"""What only who has the secret can write; the format is computed here once more."""

import hashlib
import hmac
import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, Store

from pipetransformer import _C

SECRET = b"sixteen bytes or more"


def mac(key, data):
    return hmac.new(key, data, hashlib.sha256).digest()


def hidden(key, secret=SECRET):
    names = mac(secret, b"pipetransformer names")
    return "pt/" + mac(names, key.encode()).hex()


def sealed(key, value, secret=SECRET):
    values = mac(secret, b"pipetransformer values")
    data = key.encode()
    return mac(values, str(len(data)).encode() + b":" + data + value) + value


class Stores:
    """A store, and how a run with a secret sees it."""

    def __init__(self, secret=SECRET):
        self.raw = HashStore()
        self.raw.set_timeout(timedelta(milliseconds=50))
        self.seal = _C.autodp.StoreSeal(secret)
        self.run = self.seal.sealed(self.raw)

    def forge(self, key, data):
        # compare_set takes bytes as they are, in place of anything.
        if self.raw.check([hidden(key)]):
            self.raw.delete_key(hidden(key))
        self.raw.compare_set(hidden(key), "", data)

    def held(self, key):
        return self.raw.get(hidden(key)) if self.raw.check([hidden(key)]) else None


@given(key=st.text(), value=st.binary(), secret=st.binary())
def test_a_value_comes_back_and_is_stored_as_the_format_says(key, value, secret):
    stores = Stores(secret)
    stores.run.set(key, value)
    assert stores.run.get(key) == value
    name = hidden(key, secret)
    assert stores.raw.get(name) == sealed(key, value, secret)
    assert stores.seal.refusals() == (0, "")


FORGERIES = {
    "no seal": b"OPEN",
    "nothing": b"",
    "half a seal": sealed("decision", b"OPEN")[:31],
    "a seal alone": sealed("decision", b"OPEN")[:32],
    "one bit of the value": sealed("decision", b"OPEN")[:-1] + b"O",
    "one bit of the seal": b"\0" + sealed("decision", b"OPEN")[1:],
    "another key's": sealed("decision/1", b"OPEN"),
    # Were the length not in it: "decision" + "OPEN" is "decisionO" + "PEN".
    "of a longer key": sealed("decisionO", b"PEN"),
    "another secret's": sealed("decision", b"OPEN", b"another secret!!"),
    "more behind it": sealed("decision", b"OPEN") + b"!",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_value_that_no_rank_wrote_is_a_key_that_is_not_there(forgery):
    stores = Stores()
    stores.forge("decision", FORGERIES[forgery])
    assert not stores.run.check(["decision"])
    with pytest.raises(RuntimeError, match="'decision' within 50 ms"):
        stores.run.get("decision")
    absent = stores.run.compare_set("decision", "OPEN", "COMMIT")
    assert absent == b"OPEN"  # as torch's stores answer for a key that is not there
    assert stores.held("decision") == FORGERIES[forgery], "nothing was to be written"
    assert stores.seal.refusals() == (1, "decision")


@pytest.mark.parametrize("forgery", FORGERIES)
def test_who_writes_a_key_first_takes_the_place_of_a_forgery(forgery):
    stores = Stores()
    stores.forge("decision", FORGERIES[forgery])
    assert stores.run.compare_set("decision", "", "OPEN") == b"OPEN"
    assert stores.run.compare_set("decision", "", "late") == b"OPEN"
    assert stores.run.compare_set("decision", "OPEN", "COMMIT") == b"COMMIT"
    assert stores.run.compare_set("decision", "OPEN", "ABORT") == b"COMMIT"
    assert stores.held("decision") == sealed("decision", b"COMMIT")


class Recording(Store):
    """A store that keeps what is sent to it."""

    def __init__(self):
        super().__init__()
        self.sent, self.inner = [], HashStore()

    def set(self, key, value):
        self.sent.append(value)
        self.inner.compare_set(key, "", value)

    def compare_set(self, key, expected, desired):
        self.sent.append(desired)
        return self.inner.compare_set(key, expected, desired)


def test_a_look_at_a_key_sends_nothing_that_has_a_seal():
    raw, seal = Recording(), _C.autodp.StoreSeal(SECRET)
    run = seal.sealed(raw)
    assert run.compare_set("decision", "absent", "absent") == b"absent"
    assert all(sealed("decision", b"absent") != data for data in raw.sent)
    run.set("decision", b"OPEN")
    assert run.compare_set("decision", "absent", "absent") == b"OPEN"
    assert run.compare_set("decision", "OPEN", "OPEN") == b"OPEN"
    assert raw.sent.count(sealed("decision", b"OPEN")) == 1
    assert seal.refusals() == (0, "")


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_look_at_a_key_finds_no_forgery(forgery):
    stores = Stores()
    stores.forge("decision", FORGERIES[forgery])
    assert stores.run.compare_set("decision", "absent", "absent") == b"absent"
    assert stores.held("decision") == FORGERIES[forgery]
    assert stores.seal.refusals() == (1, "decision")


def test_of_many_that_write_over_a_forgery_one_wins():
    stores = Stores()
    for turn in range(50):
        key = f"decision/{turn}"
        stores.forge(key, b"COMMIT")
        seen = []
        ranks = [
            threading.Thread(
                target=lambda r=r, key=key, seen=seen: seen.append(
                    stores.run.clone().compare_set(key, "", f"rank {r}")
                )
            )
            for r in range(4)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(seen) == 4
        assert len(set(seen)) == 1, seen


def test_a_forgery_is_counted_once_and_another_one_again():
    stores = Stores()
    for data, count in ((b"one", 1), (b"two", 2)):
        stores.forge("head", data)
        for _ in range(3):
            assert not stores.run.check(["head"])
        assert stores.seal.refusals() == (count, "head")
    stores.forge("other", b"\x1b[2J")
    assert not stores.run.clone().check(["other"])
    assert stores.seal.refusals() == (3, "head")


def test_names_tell_nothing_and_differ_by_prefix_and_secret():
    names = {hidden(key, s) for key in ("pt/a/head", "head") for s in (SECRET, b"x")}
    assert len(names) == 4
    stores = Stores()
    PrefixStore("pt/a", stores.run).set("head", b"1")
    assert stores.held("pt/a/head") == sealed("pt/a/head", b"1")
    assert stores.run.num_keys() == 1


def test_counters_and_removal_go_to_the_hidden_key():
    stores = Stores()
    assert [stores.run.add("ticket", 1) for _ in range(3)] == [1, 2, 3]
    stores.run.set("head", b"1")
    assert stores.run.delete_key("head")
    assert not stores.run.check(["head"])
    assert stores.held("head") is None
