"""The secret of a run: where it is found, who may read it, and that nobody says it."""

import logging
import os
import pathlib
import stat
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

import pipetransformer as pt
from pipetransformer.autodp import PeerFailure, secret
from pipetransformer.autodp.secret import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    find_secret,
)
from tests.autodp.world import FAST, joined
from tests.support.ranks import run_ranks

SAID, OTHER = "a secret of many letters", "another of many letters"
LONG_S = 30.0


def found(setting=None, environ=None, *, makes=False, within_s=LONG_S):
    deadline = time.monotonic() + within_s
    return find_secret(setting, environ or {}, makes=makes, deadline=deadline)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SAID + "\n")
    path.chmod(0o600)
    return path


def test_the_setting_counts_then_the_variable_then_its_file(file):
    environ = {SECRET_VARIABLE: OTHER, SECRET_FILE_VARIABLE: str(file)}
    assert found("the one in the settings", environ) == b"the one in the settings"
    assert found(None, environ) == OTHER.encode()
    del environ[SECRET_VARIABLE]
    assert found(None, environ) == SAID.encode()
    assert found(None, {}) is None
    assert found(None, {SECRET_VARIABLE: "", SECRET_FILE_VARIABLE: ""}) is None
    assert found(file) == SAID.encode()
    assert found(b"\xff" * 16) == b"\xff" * 16


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ValueError, match=f"expected mode 0600, got {mode:04o}"):
        found(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(file):
    os.chown(file, 65534, -1)
    with pytest.raises(ValueError, match="expected a file of user 0, got one of user"):
        found(file)


def test_what_is_no_file_is_refused_and_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a folder")):
        with pytest.raises(ValueError, match=f"expected a regular file, got {kind}"):
            found(path)


def test_a_link_is_followed_and_what_it_leads_to_is_checked(tmp_path, file):
    link = tmp_path / "link"
    link.symlink_to(file)
    assert found(link) == SAID.encode()
    file.chmod(0o644)
    with pytest.raises(ValueError, match="expected mode 0600, got 0644"):
        found(link)


def test_a_link_that_leads_nowhere_is_not_made_for_ever(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    made = []
    maker = threading.Thread(
        target=lambda: made.append(_error_of(found, link, makes=True, within_s=0.3)),
        daemon=True,
    )
    maker.start()
    maker.join(LONG_S)
    (error,) = made
    assert isinstance(error, TimeoutError) and f"expected the file {link}" in str(error)
    assert [*tmp_path.iterdir()] == [link]


def _error_of(call, *args, **options):
    try:
        return call(*args, **options)
    except Exception as error:
        return error


@pytest.mark.parametrize("text", ["", "fifteen letters", "x" * 4097])
def test_too_short_and_too_long_ones_are_refused_unsaid(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    match = rf"expected 16 to 4096 bytes, got {len(text)}\Z"
    with pytest.raises(ValueError, match=f"secret: {match}"):
        pt.AutoDPConfig(secret=text)
    if text:
        with pytest.raises(ValueError, match=f"{SECRET_VARIABLE}: {match}"):
            found(None, {SECRET_VARIABLE: text})
    if len(text) < 16:
        with pytest.raises(ValueError, match="expected 16 to 4096 bytes"):
            found(path)


def test_a_secret_of_a_wrong_type_is_refused_unsaid():
    with pytest.raises(TypeError, match="expected str, bytes or a path, got tuple"):
        pt.AutoDPConfig(secret=(SAID,))


@pytest.mark.parametrize("begin", ["/", "~", "~user/", "./", "../"])
def test_the_name_of_a_file_is_no_secret_unless_it_is_a_path(begin):
    name = begin + "run/secret of the job"
    with pytest.raises(ValueError, match=r"its file as a pathlib\.Path") as caught:
        pt.AutoDPConfig(secret=name)
    assert "secret of the job" not in str(caught.value)
    for said in (name.encode(), pathlib.Path(name), "a" + name):
        pt.AutoDPConfig(secret=said)


def test_rank_0_makes_the_file_for_which_others_wait(tmp_path):
    path = tmp_path / "secret"
    late = []
    waits = threading.Thread(target=lambda: late.append(found(path)))
    waits.start()
    made = found(path, makes=True)
    waits.join(LONG_S)
    assert late == [made] and len(bytes.fromhex(made.decode())) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert found(path, makes=True) == made, "what is there is kept"
    assert [*tmp_path.iterdir()] == [path]


def test_of_two_that_make_the_file_the_first_ones_counts(tmp_path, monkeypatch):
    path, make = tmp_path / "secret", secret._make

    def late(target):
        make(target)  # another run's rank 0 was quicker
        monkeypatch.setattr(secret, "_make", make)
        first = path.read_bytes()
        make(target)
        assert path.read_bytes() == first

    monkeypatch.setattr(secret, "_make", late)
    assert found(path, makes=True) == path.read_bytes().strip()


def test_who_waits_for_no_file_says_which(tmp_path):
    path = tmp_path / "secret"
    with pytest.raises(TimeoutError, match=f"expected the file {path}, which rank 0"):
        found(path, within_s=0.3)


def test_a_secret_is_in_no_text_of_the_settings():
    for said in (SAID, SAID.encode()):
        config = pt.Config(autodp=pt.AutoDPConfig(secret=said))
        for text in (repr(config), repr(config.autodp), str(config)):
            assert SAID not in text
        assert config.facts() == pt.Config().facts()


def _meets(rank, secrets, way):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("pipetransformer").addHandler(handler)
    logging.getLogger("pipetransformer").setLevel(logging.DEBUG)
    said = secrets[rank]
    if said is not None and way == "variable":
        os.environ[SECRET_VARIABLE] = said
        said = None
    try:
        # The rank that serves the store leaves last.
        patience = timedelta(seconds=20 if way == "variable" else 9 - 5 * rank)
        config = replace(FAST, secret=said, store_timeout=patience)
        with joined(config) as plane:
            values = plane.gather("told", f"rank {rank}".encode(), phase="telling")
            return values, plane.num_refused, records
    except PeerFailure as failure:
        return failure.phase, str(failure), records


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["setting", "variable"])
def test_ranks_with_one_secret_meet(way):
    for values, refused, records in run_ranks(_meets, 2, [SAID] * 2, way):
        assert values == [b"rank 0", b"rank 1"]
        assert refused == 0
        assert not [line for line in records if SAID in line]


@pytest.mark.distributed
@pytest.mark.parametrize("other", [None, OTHER])
def test_a_rank_with_another_secret_or_none_is_no_member(other):
    outcomes = run_ranks(_meets, 2, [SAID, other], "setting")
    for rank, (phase, text, records) in enumerate(outcomes):
        assert phase == "connect"
        assert f"rank {1 - rank} is process" in text, "who is there must be said"
        assert ("with a secret: is it the same one?" in text) == (other is not None)
        assert not [line for line in (text, *records) if SAID in line or OTHER in line]
    if other is None:
        assert "without a secret, not of 2 ranks, with a secret" in outcomes[0][1]
