"""What could not be read is no damage; what is damaged costs no other checkpoint."""

import errno
import logging
import os
import resource
import secrets
import shutil
import signal
import stat

import pytest
import torch

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import disk, text_files
from pipetransformer.core import tensor_files as files
from pipetransformer.report import History, write_summary
from tests.engine.scenario import config, make_engine
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One checkpoint, of step 3."""
    path = tmp_path_factory.mktemp("whole") / "saved.pt"
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        for batch in engine.batches(ToySet(12), 4):
            engine.step(batch)
        engine.save(path)
    return path


def fill(folder, whole, *steps):
    """Put checkpoints into a folder, oldest first; return their paths."""
    paths = [checkpoint.path_of_step(folder, step) for step in steps]
    for number, path in enumerate(paths, start=1):
        shutil.copy(whole, path)
        os.utime(path, ns=(number * 10**9, number * 10**9))
    return paths


def tear(path):
    info = path.stat()
    path.write_bytes(path.read_bytes()[:1000])
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def refuse_to_open(monkeypatch, path, number, times=10**9):
    """Let opening one file fail; everything else opens."""
    real, left = os.open, [times]

    def opened(name, flags, *args, **options):
        if os.fspath(name) == str(path) and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(name))
        return real(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", opened)


UNREADABLE = [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ESTALE]


@pytest.mark.parametrize("number", UNREADABLE)
def test_a_file_that_cannot_be_opened_is_an_error_and_not_skipped(
    number, tmp_path, whole, monkeypatch
):
    paths = fill(tmp_path, whole, 1, 2)
    refuse_to_open(monkeypatch, paths[1], number)
    with pytest.raises(OSError, match="may be whole, and is not skipped") as caught:
        checkpoint.newest_valid(tmp_path)
    assert caught.value.errno == number and caught.value.filename == str(paths[1])


def test_a_file_that_no_module_can_be_opened_for_is_no_damage(
    tmp_path, whole, monkeypatch
):
    """Torch imports what reads a file when it reads the first one."""

    def load(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/somewhere/module.py")

    (path,) = fill(tmp_path, whole, 1)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(OSError, match="Too many open files") as caught:
        checkpoint.newest_valid(tmp_path)
    assert caught.value.errno == errno.EMFILE and caught.value.filename == str(path)


@pytest.mark.parametrize("at", [1, 2])
def test_a_disk_that_fails_while_a_file_is_read_is_no_damage(
    at, tmp_path, whole, monkeypatch
):
    """Zip and torch say something else then: that it is no archive, or is torn."""
    (path,) = fill(tmp_path, whole, 1)
    real, count = disk._Watched.readinto, [0]

    def readinto(self, buffer):
        with self._watch():
            count[0] += 1
            if count[0] == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, buffer)

    monkeypatch.setattr(disk._Watched, "readinto", readinto)
    with pytest.raises(OSError) as caught:
        checkpoint.newest_valid(tmp_path)
    assert caught.value.errno == errno.EIO and caught.value.filename == str(path)


def test_a_stale_handle_is_opened_once_more(tmp_path, whole, monkeypatch):
    older, newer = fill(tmp_path, whole, 1, 2)
    refuse_to_open(monkeypatch, newer, errno.ESTALE, times=1)
    assert checkpoint.newest_valid(tmp_path)[0] == newer


def test_a_run_does_not_begin_at_the_start_when_its_checkpoint_cannot_be_read(
    tmp_path, whole, monkeypatch
):
    (path,) = fill(tmp_path, whole, 3)
    refuse_to_open(monkeypatch, path, errno.EIO)
    wanted = pt.CheckpointConfig(directory=tmp_path, resume=True)
    with pytest.raises(OSError, match=str(path)):
        with make_engine(
            freeze=pt.freeze.Never(), depth=1, config=config(checkpoint=wanted)
        ):
            pass
    assert path.read_bytes() == whole.read_bytes()


def read_without_memory(rank, path):
    """Read a file that is larger than what this process may still take."""
    with open("/proc/self/statm") as status:
        pages = int(status.read().split()[0])
    most = pages * resource.getpagesize() + 2**25
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        files.read(path, "file x")
    except MemoryError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return "read"


@pytest.mark.distributed
def test_want_of_memory_is_no_damage(tmp_path):
    """What torch's allocator raises has no type of its own in any of its versions."""
    path = tmp_path / "large.pt"
    files.write(path, torch.zeros(2**26, dtype=torch.uint8))
    (text,) = run_ranks(read_without_memory, 1, path)
    assert text.startswith("file x: expected to fit into memory, got: ")


def test_a_file_that_did_not_fit_into_memory_is_not_skipped(
    tmp_path, whole, monkeypatch
):
    newer, real = fill(tmp_path, whole, 1, 2)[1], torch.load

    def load(file, *args, **options):
        if os.path.samestat(os.fstat(file.fileno()), newer.stat()):
            raise MemoryError("8 GiB")
        return real(file, *args, **options)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError, match=f"checkpoint {newer}: expected to fit into"):
        checkpoint.newest_valid(tmp_path)


def test_damaged_files_are_skipped_and_none_whole_is_refused(tmp_path, whole, caplog):
    paths = fill(tmp_path, whole, 1, 2, 3)
    tear(paths[2])
    assert checkpoint.newest_valid(tmp_path)[0] == paths[1]
    assert f"skipped: checkpoint {paths[2]}: expected" in caplog.text
    for path in paths[:2]:
        tear(path)
    with pytest.raises(ValueError, match="expected a valid one among 3, got none"):
        checkpoint.newest_valid(tmp_path)


def litter(folder):
    """Put what is no file of ours under names that are."""
    names = (checkpoint.path_of_step(folder, step) for step in range(10, 20))
    os.mkfifo(next(names))
    next(names).mkdir()
    next(names).symlink_to(folder / "nothing")
    loop = next(names)
    loop.symlink_to(loop)
    next(names).symlink_to("/dev/zero")
    os.mkfifo(folder / ".a.0123456789abcdef.tmp")
    (folder / ".b.0123456789abcdef.tmp").symlink_to(folder / "precious")
    (folder / "precious").write_text("kept")


def test_what_is_no_file_is_skipped_without_a_hang(tmp_path, whole, caplog):
    litter(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    disk.clear_unfinished(tmp_path)
    assert caplog.text.count("left as it is") == 2
    assert checkpoint.newest_valid(tmp_path) is None
    assert caplog.text.count("expected a file, got none") == 5
    paths = fill(tmp_path, whole, 1, 2)
    assert checkpoint.newest_valid(tmp_path)[0] == paths[1]
    checkpoint.prune(tmp_path, keep=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == names | {paths[1].name}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_never_opened(make, tmp_path, monkeypatch):
    make(tmp_path / "x.pt")
    monkeypatch.setattr(os, "open", None)  # a device may act when it is opened
    text = "checkpoint .*x.pt: expected a regular file, got a (FIFO|folder)"
    with pytest.raises(ValueError, match=text):
        checkpoint.read(tmp_path / "x.pt")


def look_like_a_file(monkeypatch, path):
    """Let what is there be a file when it is looked at, and another thing then."""
    real = os.stat

    def stat_of(name, *args, **options):
        named = isinstance(name, str | os.PathLike) and os.fspath(name) == str(path)
        return real(__file__ if named else name, *args, **options)

    monkeypatch.setattr(os, "stat", stat_of)


def test_a_fifo_that_took_a_files_place_is_refused_without_a_hang(
    tmp_path, monkeypatch
):
    def ring(*_):
        raise AssertionError("it hangs")

    path = tmp_path / "x.pt"
    os.mkfifo(path)
    look_like_a_file(monkeypatch, path)
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    try:
        with pytest.raises(ValueError, match=r"x.pt: expected a regular .* a FIFO"):
            checkpoint.read(path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_link_that_took_a_files_place_is_not_followed(tmp_path, whole, monkeypatch):
    path = tmp_path / "link"
    path.symlink_to(whole)
    look_like_a_file(monkeypatch, path)
    with (
        pytest.raises(OSError) as caught,
        disk.reading(path, "file", follow=False),
    ):
        pass
    assert caught.value.errno == errno.ELOOP and caught.value.filename == str(path)
    with disk.reading(path, "file") as file:
        assert file.read() == whole.read_bytes()


def test_a_checkpoint_goes_only_when_enough_newer_ones_were_found_whole(
    tmp_path, whole, monkeypatch, caplog
):
    paths = fill(tmp_path, whole, 1, 2, 3, 4, 5)
    tear(paths[4])  # newest
    refuse_to_open(monkeypatch, paths[3], errno.EIO)
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(tmp_path.iterdir()) == paths[1:]
    assert caplog.text.count("neither counted nor deleted") == 2
    checkpoint.prune(tmp_path, keep=3)
    assert sorted(tmp_path.iterdir()) == paths[1:]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path, whole, monkeypatch, caplog
):
    paths = fill(tmp_path, whole, 1, 2)

    def refuse(self, missing_ok=False):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))

    monkeypatch.setattr(type(paths[0]), "unlink", refuse)
    checkpoint.prune(tmp_path, keep=1)
    assert f"Input/output error: '{paths[0]}'" in caplog.text


def test_a_file_is_read_once_to_be_counted_and_again_when_it_has_changed(
    tmp_path, whole, monkeypatch
):
    first, second, third = fill(tmp_path, whole, 1, 2, 3)
    read, real = [], files.require_whole
    monkeypatch.setattr(
        files, "require_whole", lambda p, what: (read.append(p), real(p, what))
    )
    known = set()
    checkpoint.prune(tmp_path, keep=3, whole=known)
    assert read == []  # nobody needs to know
    for _ in range(2):
        checkpoint.prune(tmp_path, keep=2, whole=known)
    assert read == [third, second] and not first.exists()
    tear(third)
    saved = checkpoint.path_of_step(tmp_path, 4)
    shutil.copy(whole, saved)
    checkpoint.prune(tmp_path, keep=2, saved=saved, whole=known)
    assert read == [third, second, third]
    assert sorted(tmp_path.iterdir()) == [second, third, saved]


# -- writing -------------------------------------------------------------------

WRITERS = {
    "tensors": lambda path: files.write(path, {"x": torch.zeros(3)}),
    "summary": lambda path: write_summary(History(world_size=1, seed=0), path),
    "text": lambda path: text_files.write(path, "text"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_no_writer_opens_a_file_that_it_did_not_make(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 16)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = tmp_path / f".file.{'0' * 16}.tmp"
    for plant in (planted.symlink_to, planted.hardlink_to):
        plant(victim)
        with pytest.raises(FileExistsError):
            WRITERS[kind](tmp_path / "file")
        assert victim.read_text() == "precious"
        planted.unlink()  # not ours to delete: it is still there


@pytest.mark.parametrize("kind", WRITERS)
def test_every_file_is_its_owners_alone(kind, tmp_path):
    WRITERS[kind](tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["tensors", "summary"])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(kind, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    path.symlink_to(victim)
    WRITERS[kind](path)
    assert victim.read_text() == "precious" and not path.is_symlink()


def test_a_file_is_on_the_disk_before_it_takes_a_name(tmp_path, monkeypatch):
    calls, sync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        calls.append("file" if stat.S_ISREG(os.fstat(descriptor).st_mode) else "folder")
        sync(descriptor)

    def renamed(*names):
        calls.append("name")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    for write in WRITERS.values():
        calls.clear()
        write(tmp_path / "file")
        assert calls == ["file", "name", "folder"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_its_file_system_cannot_sync_is_no_failure(
    number, tmp_path, monkeypatch
):
    def sync(descriptor, real=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    if number == errno.EINVAL:
        files.write(tmp_path / "file", 1)
    else:
        with pytest.raises(OSError, match="Input/output error: .*file'"):
            files.write(tmp_path / "file", 1)
    assert files.read(tmp_path / "file", "file") == 1


def test_a_file_that_cannot_be_looked_at_is_closed_again(tmp_path, whole, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "_Watched", refuse)
    before = os.listdir("/proc/self/fd")
    for act in (checkpoint.read, lambda path: files.write(path, 1)):
        with pytest.raises(OSError, match="Input/output error"):
            act(whole)
    assert os.listdir("/proc/self/fd") == before
    assert list(whole.parent.iterdir()) == [whole]


def test_what_reads_back_otherwise_takes_no_files_place(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write(path, torch.arange(1000))
    before, real = path.read_bytes(), os.fsync

    def lie(descriptor):
        real(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.pwrite(descriptor, b"\xff" * 16, 1000)

    monkeypatch.setattr(os, "fsync", lie)
    with pytest.raises(OSError, match="reads back otherwise than written") as caught:
        files.write(path, torch.arange(1000) + 1)
    assert caught.value.filename == str(path) and path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_for_its_owner_to_write_and_an_open_one_is_told(
    tmp_path, caplog
):
    made = tmp_path / "made" / "below"
    before = os.umask(0)
    try:
        files.make_folder(made, "folder")
    finally:
        os.umask(before)
    for folder in (made, made.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert not caplog.records
    made.chmod(0o777)
    files.make_folder(made, "folder")
    assert "every user may write to" in caplog.text


def test_going_on_from_a_file_of_another_user_is_told(
    tmp_path, whole, monkeypatch, caplog
):
    (path,) = fill(tmp_path, whole, 1)
    checkpoint.newest_valid(tmp_path)
    assert not caplog.records
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    checkpoint.newest_valid(tmp_path)
    assert "is the file of another user" in caplog.text


@pytest.fixture(autouse=True)
def _warnings_only(caplog):
    caplog.set_level(logging.WARNING, logger="pipetransformer")
