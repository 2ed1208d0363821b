"""Damaged files end in a value or the documented error; what does not is a fault."""

import ctypes
import faulthandler
import os
import signal
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import feed_files
from _file_kinds import (
    Fault,
    Kind,
    kinds,
    read_checkpoint,
    require_kept,
    run_command,
    whole_checkpoint_bytes,
)
from pipetransformer.checkpoint import format as checkpoint

FEW = 120  # the program's default is 100,000 over all kinds
CHANGED = "step-0000000008.pt"
JSON = ("profile.json", "cluster.json", "plan.json", "summary.json")
NAMES = (*JSON, "step-0000000007.pt", CHANGED)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return kinds(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def whole_checkpoint(tmp_path):
    path = tmp_path / "whole.pt"
    path.write_bytes(whole_checkpoint_bytes())
    return path


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_taken_or_refused_as_documented(name, known, tmp_path):
    tally = feed_files.feed(known[name], 0, range(FEW), tmp_path)
    assert tally.faults == {}
    assert tally.taken + tally.refused == FEW
    assert tally.refused > FEW // 4
    assert tally.taken > 0 or name == CHANGED  # few bytes of it mean nothing


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


class Lenient:
    """A reader that takes whatever it is given, as it likes."""

    def __init__(self, kept):
        self.kept = kept

    def to_json(self):
        return self.kept


@pytest.mark.parametrize(
    ("text", "kept", "said"),
    [
        ('{"a": 1, "a": 2}', '{"a": 2}', "expected each name once"),
        ('{"a": NaN}', '{"a": 0}', "expected JSON, got NaN"),
        ('{"a": 1, "b": 2}', '{"a": 1}', "expected 'b' refused, got it dropped"),
        ('{"a": []}', "{}", ": expected 'a' refused, got it dropped"),
        ('{"skips": [[0, 1]]}', "{}", ": expected 'skips' refused, got it dropped"),
        ('{"skips": []}', '{"skips": [[0, 1]]}', "/skips: expected a list of 0, got"),
        ('{"a": {"skips": []}}', '{"a": {}}', "/a: expected 'skips' refused, got it"),
        ('{"a": 1.0}', '{"a": 1}', "/a: expected 1.0 kept or refused, got 1"),
        ('{"a": true}', '{"a": 1}', "/a: expected True kept or refused, got 1"),
        ('{"a": 2}', '{"a": 1}', "/a: expected 2 kept or refused, got 1"),
        ('{"a": [1]}', '{"a": []}', "/a: expected a list of 1, got another"),
        ('{"a": -1}', '{"a": -1}', "/a: expected a number refused, got -1"),
        ('{"a": 1e999}', '{"a": 1e999}', "/a: expected a number refused, got inf"),
        ('{"a": "\\u001b"}', '{"a": "\\u001b"}', "/a: expected a text refused"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}', "/a: expected a text refused"),
        (f'{{"name": "{"x" * 257}"}}', f'{{"name": "{"x" * 257}"}}', "/name: expected"),
    ],
)
def test_a_text_that_is_wrongly_taken_is_a_fault(text, kept, said, tmp_path):
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(Fault) as caught:
        require_kept(path, lambda _: Lenient(kept))
    assert said in str(caught.value)


def test_what_a_reader_adds_by_default_is_no_fault(tmp_path):
    path = tmp_path / "it.json"
    path.write_text('{"a": 1, "some_hash": 18446744073709551615}')
    kept = '{"a": 1.0, "b": null, "some_hash": 18446744073709551615}'
    assert require_kept(path, lambda _: Lenient(kept))


def test_an_empty_list_that_canonical_texts_leave_out_is_no_fault(tmp_path):
    path = tmp_path / "it.json"
    path.write_text('{"a": 1, "skips": [], "tied_layers": []}')
    assert require_kept(path, lambda _: Lenient('{"a": 1}'))


def test_changed_bytes_that_are_taken_are_a_fault(known, tmp_path, monkeypatch):
    """Of a reader that compares no checksums."""
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: None)
    tally = feed_files.feed(known[CHANGED], 0, range(FEW), tmp_path)
    assert any("changed bytes refused, got them taken" in text for text in tally.faults)


def unchecked(change):
    """Return `checkpoint.read` without what it promises about one thing."""
    read = checkpoint.read

    def read_changed(path):
        content = read(path)
        return {**content, **change(content)}

    return read_changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: {"progress": {**c["progress"], "step": -7}}, "step refused, got -7"),
        (lambda c: {"progress": {**c["progress"], "step": "7"}}, "step refused, got 7"),
        (
            lambda c: {"progress": {**c["progress"], "batch": 2**63}},
            f"batch refused, got {2**63}",
        ),
    ],
)
def test_wrong_counters_of_a_checkpoint_that_are_taken_are_a_fault(
    change, said, whole_checkpoint, monkeypatch
):
    monkeypatch.setattr(checkpoint, "read", unchecked(change))
    with pytest.raises(Fault, match=said):
        read_checkpoint(whole_checkpoint)


def test_weights_of_a_checkpoint_that_are_not_loaded_are_a_fault(
    whole_checkpoint, monkeypatch
):
    def load(content, state):
        state.load_progress(content["progress"])

    monkeypatch.setattr(checkpoint, "load_model", load)
    with pytest.raises(Fault, match="expected its weights loaded, got others"):
        read_checkpoint(whole_checkpoint)


def test_a_compressed_checkpoint_that_is_taken_is_a_fault(
    whole_checkpoint, monkeypatch, tmp_path
):
    packed = tmp_path / "packed.pt"
    with (
        zipfile.ZipFile(whole_checkpoint) as whole,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for entry in whole.infolist():
            archive.writestr(entry.filename, whole.read(entry))
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda path: read(whole_checkpoint))
    with pytest.raises(Fault, match="expected stored entries"):
        read_checkpoint(packed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("checkpoint {path}: expected this, got \x1b[2J", "expected no escapes"),
        ("expected this, got that", "expected the file's name"),
        ("checkpoint {path}: expected " + 3000 * "x", "expected the file's name"),
    ],
)
def test_an_error_of_a_checkpoint_that_nobody_was_promised_is_a_fault(
    text, said, whole_checkpoint, monkeypatch
):
    def refuse(path):
        raise ValueError(text.format(path=path))

    monkeypatch.setattr(checkpoint, "read", refuse)
    with pytest.raises(Fault, match=said):
        read_checkpoint(whole_checkpoint)


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
