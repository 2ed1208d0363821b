"""Damaged files end in a value or the documented error; what does not is a fault."""

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import feed_files
from _file_kinds import Fault, Kind, kinds, run_command

FEW = 120  # the program's default is 20,000 of each kind
NAMES = ("profile.json", "cluster.json", "plan.json", "summary.json")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return kinds(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_taken_or_refused_as_documented(name, known, tmp_path):
    tally = feed_files.feed(known[name], 0, range(FEW), tmp_path)
    assert tally.faults == {}
    assert tally.taken + tally.refused == FEW
    assert tally.taken > 0 and tally.refused > FEW // 4


def test_a_number_and_a_seed_make_the_same_file_again(known):
    for kind in known.values():
        first = [feed_files.make(kind, 0, number) for number in range(5)]
        assert first == [feed_files.make(kind, 0, number) for number in range(5)]
        assert first != [feed_files.make(kind, 1, number) for number in range(5)]
        assert len(set(first)) > 1


# -- planted faults --------------------------------------------------------------


def wrong():
    raise KeyError("step")


def hungry():
    bytes(2 * feed_files.MOST_BYTES)


def busy():
    while True:
        pass


def crashing():
    faulthandler.disable()  # pytest's, of a process that dies on purpose
    ctypes.string_at(1)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (wrong, "KeyError at test_feed_files.py"),
        (hungry, "MemoryError at test_feed_files.py"),
        (busy, "hang"),
        (crashing, "death: exit code -11"),
        (killed, "death: exit code -9"),
    ],
)
def test_what_nobody_was_promised_is_a_fault_of_that_file_alone(
    fault, said, tmp_path, monkeypatch
):
    def numbered(kind, seed, number):
        return str(number).encode()

    def read(path):
        if path.read_bytes() == b"3":
            fault()
        return True

    monkeypatch.setattr(feed_files, "make", numbered)
    monkeypatch.setattr(feed_files, "HANG_CPU_S", 2.0)
    kind = Kind("it", lambda rng: b"", read)
    tally = feed_files.feed(kind, 0, range(8), tmp_path)
    ((outcome, numbers),) = tally.faults.items()
    assert outcome.startswith(said) and numbers == [3]
    assert tally.taken == 7


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("\x1b[2J", 0, "expected no control characters"),
        ("\x9b2J", 0, "expected no control characters"),
        ("x" * 20_000_001, 0, "expected 20000000 letters at most"),
        ("", 2, "expected the documented line"),
        ("", 3, "expected 0, 1 or 2, got 3"),
    ],
)
def test_escapes_floods_and_other_errors_on_the_console_are_faults(
    text, code, said, monkeypatch
):
    def act(arguments):
        print(text)
        return code

    monkeypatch.setattr("pipetransformer.cli.main.main", act)
    with pytest.raises(Fault, match=said):
        run_command([])


def test_the_program_tells_how_to_repeat_a_fault(monkeypatch, capsys, tmp_path):
    def two(folder):
        bad = Kind("bad", lambda rng: b"x", lambda path: wrong())
        return {"bad": bad, "good": Kind("good", lambda rng: b"y", lambda path: True)}

    monkeypatch.setattr(feed_files, "kinds", two)
    assert feed_files.main(["--inputs", "6", "--keep", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "bad: 3 files, 0 taken, 0 refused, 3 faults" in said
    assert "first --first 0" in said and "good: 3 files, 3 taken" in said
    assert (tmp_path / "0-bad").read_bytes() == b"x"
    assert feed_files.main(["--inputs", "4", "--kinds", "good"]) == 0
    assert feed_files.main(["--kinds", "other"]) == 2
