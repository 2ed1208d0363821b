"""Files of tensors: whole or refused, whatever happened to their bytes."""

import errno
import fcntl
import os
import pathlib
import pickle
import resource
import stat
import zipfile

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import disk, text_files
from pipetransformer.core import tensor_files as files

CONTENT = {"numbers": torch.arange(1000.0), "name": "x"}


def written(tmp_path):
    path = tmp_path / "file.pt"
    files.write(path, CONTENT)
    return path


def test_what_was_written_is_read(tmp_path):
    found = files.read(written(tmp_path), "file")
    assert torch.equal(found["numbers"], CONTENT["numbers"]) and found["name"] == "x"


def test_a_disk_that_is_full_is_named_and_leaves_the_older_file(tmp_path):
    path = written(tmp_path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            files.write(path, {"numbers": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


@pytest.mark.parametrize("write", [files.write, text_files.replace])
def test_what_is_no_file_is_never_replaced(tmp_path, write):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="regular file or none, got a FIFO"):
        write(path, "text")
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError, match="got a device") as caught:
        write("/dev/null", "text")
    assert caught.value.filename == "/dev/null"


def _zip_of(path, name, data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)


NO_CHECKPOINTS = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "text": lambda path: path.write_text("step 9\n" * 100),
    "random": lambda path: path.write_bytes(
        torch.randint(0, 256, (5000,), dtype=torch.uint8).numpy().tobytes()
    ),
    "directory": pathlib.Path.mkdir,
    "pickle": lambda path: path.write_bytes(pickle.dumps({"format": 1})),
    "legacy": lambda path: torch.save(
        {"format": 1}, path, _use_new_zipfile_serialization=False
    ),
    "zip": lambda path: _zip_of(path, "a.txt", "text"),
    "zip with a bad pickle": lambda path: _zip_of(
        path, "a/data.pkl", b"\x80\x02garbage"
    ),
    "list": lambda path: torch.save([1, 2], path),
    "tensor": lambda path: torch.save(torch.ones(3), path),
    "parts missing": lambda path: torch.save({"format": 1}, path),
    "parts of another kind": lambda path: torch.save(
        {"format": 1, "signature": 3, "model": []}, path
    ),
    "format of another kind": lambda path: torch.save({"format": [1]}, path),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_file_of_another_kind_is_a_value_error(kind, tmp_path):
    path = tmp_path / "step-0000000001.pt"
    NO_CHECKPOINTS[kind](path)
    with pytest.raises(ValueError, match="checkpoint .*step-0000000001.pt: expected"):
        checkpoint.read(path)
    if path.is_file():
        with pytest.raises(ValueError, match="expected a valid one among 1, got none"):
            checkpoint.newest_valid(tmp_path)
    else:
        assert checkpoint.newest_valid(tmp_path) is None


@pytest.mark.parametrize("chosen", [True, False])
def test_one_changed_byte_is_found(chosen, tmp_path):
    before = get_crc32_options()
    set_crc32_options(chosen)
    try:
        path = written(tmp_path)
        assert get_crc32_options() is chosen
    finally:
        set_crc32_options(before)
    data = bytearray(path.read_bytes())
    data[data.index(CONTENT["numbers"].numpy().tobytes()) + 1234] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match="expected a complete file of tensors, got: bad"
    ):
        files.read(path, "file")


@pytest.mark.parametrize("bits", [0x10, 0xFF])
def test_no_changed_byte_anywhere_changes_what_is_read(bits, tmp_path):
    """Names, sizes and marks of an archive's parts have no checksums."""
    path, numbers = tmp_path / "file.pt", torch.arange(4.0)
    files.write(path, numbers)
    data, refused = bytearray(path.read_bytes()), 0
    for place in range(len(data)):
        data[place] ^= bits
        path.write_bytes(data)
        data[place] ^= bits
        try:
            assert torch.equal(files.read(path, "file"), numbers), place
        except ValueError:
            refused += 1
    assert refused > len(data) // 8


@pytest.mark.parametrize("links", [True, False])
def test_older_file_can_be_kept(links, tmp_path, monkeypatch):
    if not links:

        def refuse(*_):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "file.pt"
    for number in (1, 2):
        files.write(path, number, replace=False)
    assert files.read(path, "file") == 1
    files.write(path, 3)
    assert files.read(path, "file") == 3
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file_stays_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "none.pt", "file")


def test_files_of_dead_writers_are_deleted_and_no_others(tmp_path):
    path = written(tmp_path)
    dead = tmp_path / f".step-0000000004.pt.{'0' * 16}.tmp"
    alive = tmp_path / f".step-0000000005.pt.{'1' * 16}.tmp"
    foreign = tmp_path / ".notes.tmp"
    for other in (dead, alive, foreign):
        other.write_bytes(b"half")
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        disk.clear_unfinished(tmp_path)
        assert set(tmp_path.iterdir()) == {path, alive, foreign}
    disk.clear_unfinished(tmp_path)
    assert set(tmp_path.iterdir()) == {path, foreign}
    disk.clear_unfinished(tmp_path / "none")


def test_files_of_dead_writers_are_deleted_where_locks_ask_for_writing(
    tmp_path, monkeypatch
):
    """As on NFS, whose locks are those of byte ranges."""
    flock = fcntl.flock

    def of_nfs(file, operation):
        number = file if isinstance(file, int) else file.fileno()
        reads = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if operation & fcntl.LOCK_EX and reads:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    path = written(tmp_path)
    dead = tmp_path / f".step-0000000004.pt.{'0' * 16}.tmp"
    dead.write_bytes(b"half")
    disk.clear_unfinished(tmp_path)
    assert set(tmp_path.iterdir()) == {path}


def test_files_of_other_users_are_left_with_a_warning(tmp_path, monkeypatch, caplog):
    left = tmp_path / f".step-0000000004.pt.{'0' * 16}.tmp"
    left.write_bytes(b"half")

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(left))

    monkeypatch.setattr(os, "open", refuse)  # root may open everything
    disk.clear_unfinished(tmp_path)
    assert left.exists() and "left as it is" in caplog.text


def test_file_system_without_locks_still_takes_files(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = written(tmp_path)
    left = tmp_path / f".step-0000000004.pt.{'0' * 16}.tmp"
    left.write_bytes(b"half")
    disk.clear_unfinished(tmp_path)
    assert f"left as it is: [Errno {errno.ENOLCK}]" in caplog.text
    assert str(left) in caplog.text
    assert set(tmp_path.iterdir()) == {path, left}  # nobody knows whether it is dead


def test_a_folder_where_none_can_be_made_is_an_error_and_no_endless_try():
    with pytest.raises(FileNotFoundError, match="/proc/none"):
        disk.make_folder("/proc/none/below")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ValueError, match="^folder: expected a .*, which is read-only$"):
        files.make_folder(tmp_path / "new", "folder")
