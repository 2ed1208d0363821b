"""Files of cached activations: what is read is right, whatever happened to the file."""

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import stat
import time

import pytest
import torch

from pipetransformer.autocache import (
    ActivationCache,
    CacheFolder,
    Ragged,
    cache_files,
    damaged_records,
    folder,
)
from pipetransformer.core import disk

from .test_cache import SAMPLES, make_cache, merged, values

IDS = torch.arange(SAMPLES)
LAYERS = 7


def filled(rows=IDS, *, fingerprint=1, **options):
    cache = make_cache(**options)
    cache.store(rows, (values(rows, 1),), boundary=1, fingerprint=fingerprint)
    return cache


def kept(tmp_path, cache, space="train"):
    """Keep what a cache has, and return its file."""
    keeper = CacheFolder(tmp_path)
    keeper.load(make_cache(), space, LAYERS)  # makes the file known, and is empty
    keeper.save(cache, space, LAYERS)
    return keeper.path_of(space, LAYERS, SAMPLES)


def found_in(tmp_path, space="train", layers=LAYERS):
    """Return the records that a new run starts with, by sample."""
    cache = make_cache()
    CacheFolder(tmp_path).load(cache, space, layers)
    return merged(cache.fetch(IDS, chain=[0, 1]), SAMPLES)


def as_stored(rows):
    return all(torch.equal(row[1][0], values(IDS[s : s + 1], 1)[0]) for s, row in rows)


def test_a_second_cache_has_the_records_of_the_first_bit_by_bit(tmp_path):
    path = kept(tmp_path, filled())
    rows = found_in(tmp_path)
    assert sorted(rows) == IDS.tolist()
    assert as_stored(rows.items())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert damaged_records(path) == 0
    assert [file.path for file in cache_files(tmp_path)] == [path]


def test_tuples_of_all_dtypes_and_ragged_rows_come_back(tmp_path):
    ragged = Ragged(lambda inputs: None, dim=(1, 1, None), fill=(0.0, 1.0, 0.0))
    lengths = torch.tensor([3, 0, 5, 1])
    wide = torch.randn(4, 5, 2, dtype=torch.bfloat16)
    mask = torch.ones(4, 5, dtype=torch.bool)
    for row, length in enumerate(lengths):
        wide[row, length:], mask[row, length:] = 0, True
    plain = torch.randn(4, 3, dtype=torch.complex64)

    def cache():
        return make_cache(ragged=True)

    def fetched(of):
        (group,) = of.fetch(IDS[:4], chain=[0, 1], ragged=ragged, length=5)
        return group.tensors

    keeper, first = CacheFolder(tmp_path), cache()
    keeper.load(first, "train", LAYERS)
    first.store(
        IDS[:4],
        (wide, mask, plain),
        boundary=1,
        fingerprint=1,
        ragged=ragged,
        lengths=lengths,
    )
    keeper.save(first, "train", LAYERS)
    second = cache()
    assert CacheFolder(tmp_path).load(second, "train", LAYERS) == 4
    for one, other in zip(fetched(first), fetched(second), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "change",
    [{"layers": LAYERS + 1}, {"space": "val"}],
    ids=["other first layer", "other set"],
)
def test_files_of_others_are_not_read(tmp_path, change):
    kept(tmp_path, filled())
    assert found_in(tmp_path, **change) == {}


def test_sets_of_one_name_and_other_sizes_keep_files_of_their_own(tmp_path):
    path = kept(tmp_path, filled())
    before = path.read_bytes()
    larger, keeper = make_cache(num_samples=SAMPLES + 1), CacheFolder(tmp_path)
    assert keeper.load(larger, "train", LAYERS) == 0
    larger.store(IDS[:5], (values(IDS[:5], 1),), boundary=1, fingerprint=1)
    keeper.save(larger, "train", LAYERS)
    assert path.read_bytes() == before
    assert len(cache_files(tmp_path)) == 2


def test_no_flipped_bit_is_ever_served(tmp_path):
    path = kept(tmp_path, filled())
    whole = path.read_bytes()
    draw = random.Random(0)
    served = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        rows = found_in(tmp_path)
        assert as_stored(rows.items())
        served += len(rows)
    assert 0 < served < 1000 * SAMPLES


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_left_unread(tmp_path, share, caplog):
    path = kept(tmp_path, filled())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert found_in(tmp_path) == {}
    assert "left unread" in caplog.text


def test_what_is_behind_a_damaged_header_is_lost_and_counted(tmp_path, caplog):
    path = kept(tmp_path, filled())
    content = bytearray(path.read_bytes())
    each = (len(content) - folder.HEAD_BYTES) // SAMPLES
    content[folder.HEAD_BYTES + 3 * each] ^= 1
    path.write_bytes(content)
    assert sorted(found_in(tmp_path)) == [0, 1, 2]
    assert damaged_records(path) == SAMPLES - 3
    assert "damaged" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "others may write"])
def test_what_is_no_file_of_this_user_is_left_alone(tmp_path, kind):
    path = kept(tmp_path, filled())
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    else:
        elsewhere.rename(path)
        path.chmod(0o666)
    assert found_in(tmp_path) == {}
    assert [file.head for file in cache_files(tmp_path)] == [None]


@pytest.mark.parametrize(
    "change",
    [
        {"torch_version": "1.0"},
        {"machine": "big abacus"},
        {"format": 3},
        {"records": "40"},
        {"surplus": 1},
    ],
    ids=str,
)
def test_files_of_other_versions_are_left_unread(tmp_path, change):
    path = kept(tmp_path, filled())
    content = path.read_bytes()
    head = {**json.loads(content[: folder.HEAD_BYTES]), **change}
    line = json.dumps(head).encode().ljust(folder.HEAD_BYTES - 1) + b"\n"
    path.write_bytes(line + content[folder.HEAD_BYTES :])
    assert found_in(tmp_path) == {}


def test_a_set_with_an_endless_name_is_not_kept_and_said_so(tmp_path, caplog):
    keeper, cache = CacheFolder(tmp_path), filled()
    keeper.load(make_cache(), "x" * 5000, LAYERS)
    keeper.save(cache, "x" * 5000, LAYERS)
    assert "not kept: name of a set" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_later_run_adds_its_records(tmp_path):
    kept(tmp_path, filled(IDS[:10]))
    second, keeper = make_cache(), CacheFolder(tmp_path)
    assert keeper.load(second, "train", LAYERS) == 10
    keeper.save(second, "train", LAYERS)
    untouched = keeper.path_of("train", LAYERS, SAMPLES).stat().st_ino
    rest = IDS[10:]
    second.store(rest, (values(rest, 1),), boundary=1, fingerprint=1)
    keeper.save(second, "train", LAYERS)
    assert keeper.path_of("train", LAYERS, SAMPLES).stat().st_ino != untouched
    assert sorted(found_in(tmp_path)) == IDS.tolist()


def test_two_runs_that_began_empty_lose_nothing_of_each_other(tmp_path):
    runs = [(CacheFolder(tmp_path), make_cache()) for _ in range(2)]
    for keeper, cache in runs:
        keeper.load(cache, "train", LAYERS)
    for (keeper, cache), rows in zip(runs, (IDS[:20], IDS[15:]), strict=True):
        cache.store(rows, (values(rows, 1),), boundary=1, fingerprint=1)
        keeper.save(cache, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == IDS.tolist()


def test_what_another_run_adds_while_a_file_is_read_is_not_lost(tmp_path, monkeypatch):
    kept(tmp_path, filled(IDS[:10]))
    late, other = CacheFolder(tmp_path), filled(IDS[10:20])
    late.load(make_cache(), "train", LAYERS)
    own, keeper = make_cache(), CacheFolder(tmp_path)
    load = ActivationCache.load

    def interrupted(cache, *arguments):
        found = load(cache, *arguments)
        if cache is own:
            monkeypatch.setattr(ActivationCache, "load", load)
            late.save(other, "train", LAYERS)
        return found

    monkeypatch.setattr(ActivationCache, "load", interrupted)
    assert keeper.load(own, "train", LAYERS) == 10
    own.store(IDS[20:], (values(IDS[20:], 1),), boundary=1, fingerprint=1)
    keeper.save(own, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == IDS.tolist()


def test_nodes_that_share_a_folder_read_each_other(tmp_path):
    for node, rows in enumerate((IDS[:20], IDS[20:])):
        keeper, cache = CacheFolder(tmp_path, node), make_cache()
        keeper.load(cache, "train", LAYERS)
        cache.clear()
        cache.store(rows, (values(rows, 1),), boundary=1, fingerprint=1)
        keeper.save(cache, "train", LAYERS)
    assert len(cache_files(tmp_path)) == 2
    assert sorted(found_in(tmp_path)) == IDS.tolist()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_a_small_cache_has_no_room_for_stays_in_the_file(tmp_path, is_wrong):
    kept(tmp_path, filled())
    keeper, small = CacheFolder(tmp_path), make_cache(num_slots=3)
    assert keeper.load(small, "train", LAYERS) == 3
    if is_wrong:  # an audit found records of an earlier run to be
        small.clear()
    small.store(IDS[:1], (values(IDS[:1], 1),), boundary=1, fingerprint=2)
    keeper.save(small, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == ([] if is_wrong else IDS[1:].tolist())
    keeper.save_soon(small, "train", LAYERS)
    assert keeper.settle()
    small.store(IDS[1:2], (values(IDS[1:2], 1),), boundary=1, fingerprint=1)
    keeper.save(small, "train", LAYERS)
    rows = found_in(tmp_path)
    assert sorted(rows) == ([1] if is_wrong else IDS[1:].tolist())
    assert as_stored(rows.items())


def test_after_a_clear_records_that_others_write_stay(tmp_path):
    kept(tmp_path, filled())
    keeper, small = CacheFolder(tmp_path), make_cache(num_slots=3)
    keeper.load(small, "train", LAYERS)
    small.clear()
    small.store(IDS[:1], (values(IDS[:1], 1),), boundary=1, fingerprint=1)
    keeper.save(small, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == [0]
    kept(tmp_path, filled(IDS[1:]))
    small.store(IDS[1:2], (values(IDS[1:2], 1),), boundary=1, fingerprint=1)
    keeper.save(small, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == IDS.tolist()


def test_what_was_cleared_does_not_come_back_from_a_file(tmp_path):
    kept(tmp_path, filled())
    keeper, cache = CacheFolder(tmp_path), make_cache()
    keeper.load(cache, "train", LAYERS)
    kept(tmp_path, filled())  # another run writes the same
    cache.clear()
    cache.store(IDS[:1], (values(IDS[:1], 1),), boundary=1, fingerprint=1)
    keeper.save(cache, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == [0]
    assert cache.fetch(IDS[1:], chain=[0, 1]) == []


def test_a_clear_while_a_file_is_written_is_heeded(tmp_path, monkeypatch):
    kept(tmp_path, filled())
    keeper, cache = CacheFolder(tmp_path), make_cache(num_slots=3)
    keeper.load(cache, "train", LAYERS)
    cache.store(IDS[:1], (values(IDS[:1], 1),), boundary=1, fingerprint=2)
    save = ActivationCache.save

    def then_clear(self, *args, **options):
        found = save(self, *args, **options)
        monkeypatch.setattr(ActivationCache, "save", save)
        self.clear()
        return found

    monkeypatch.setattr(ActivationCache, "save", then_clear)
    keeper.save(cache, "train", LAYERS)
    assert found_in(tmp_path) == {}


def test_a_file_that_cannot_be_read_now_is_not_replaced_by_less(tmp_path, monkeypatch):
    kept(tmp_path, filled())
    keeper, cache = CacheFolder(tmp_path), make_cache()

    def fail(self, *args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(ActivationCache, "load", fail)
        assert keeper.load(cache, "train", LAYERS) == 0
    cache.store(IDS[:1], (values(IDS[:1], 1),), boundary=1, fingerprint=1)
    keeper.save(cache, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == IDS.tolist()


@pytest.mark.parametrize("is_well_again", [False, True])
def test_a_file_that_cannot_be_opened_keeps_its_records(
    tmp_path, is_well_again, monkeypatch, caplog
):
    path = kept(tmp_path, filled())
    before = path.read_bytes()
    keeper, cache = CacheFolder(tmp_path), make_cache()

    def fail(*args, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(disk, "reading", fail)
        assert keeper.load(cache, "train", LAYERS) == 0
        cache.store(IDS[:1], (values(IDS[:1], 1),), boundary=1, fingerprint=1)
        if not is_well_again:
            keeper.save(cache, "train", LAYERS)
            assert path.read_bytes() == before
            assert "cached activations are not kept" in caplog.text
    if is_well_again:
        keeper.save(cache, "train", LAYERS)
    assert sorted(found_in(tmp_path)) == IDS.tolist()


def test_a_run_does_not_wait_for_one_that_writes(tmp_path, caplog):
    keeper, cache = CacheFolder(tmp_path), filled()
    keeper.load(make_cache(), "train", LAYERS)
    with disk.alone_in(tmp_path, 0.0) as alone, caplog.at_level(logging.INFO):
        assert alone
        keeper.save_soon(cache, "train", LAYERS)
        keeper._saving.join(60)
    assert "another run writes" in caplog.text
    assert list(tmp_path.iterdir()) == []
    keeper.save_soon(cache, "train", LAYERS)
    keeper._saving.join(60)
    assert sorted(found_in(tmp_path)) == IDS.tolist()


class Writing:
    """Stands for a thread that writes, which takes five waits if it gets on at all."""

    def __init__(self, path, *, grows):
        self.path, self.grows, self.waits = path, grows, 0

    def join(self, timeout):
        self.waits += 1
        with self.path.open("ab") as file:
            file.write(b"0" * self.grows)

    def is_alive(self):
        return not self.grows or self.waits < 5


@pytest.mark.parametrize("grows", [True, False])
def test_the_end_waits_for_a_file_as_long_as_it_grows(grows, tmp_path, caplog):
    keeper = CacheFolder(tmp_path)
    keeper.load(make_cache(), "train", LAYERS)
    name = keeper.path_of("train", LAYERS, SAMPLES).name
    writing = Writing(tmp_path / f".{name}.0.tmp", grows=grows)
    writing.path.touch()
    keeper._saving = writing
    assert keeper.settle() == grows and writing.waits == (5 if grows else 1)
    assert ("still being written" in caplog.text) != grows


def test_a_forked_child_does_not_keep_other_runs_from_writing(tmp_path):
    with disk.alone_in(tmp_path, 0.0):
        child = multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(60,)
        )
        child.start()
    try:
        with disk.alone_in(tmp_path, 0.0) as alone:
            assert alone
    finally:
        child.kill()
        child.join(60)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_costs_a_warning_and_leaves_the_file(
    tmp_path, error, monkeypatch, caplog
):
    path = kept(tmp_path, filled(IDS[:10]))
    before = path.read_bytes()

    def fail(self, descriptor, begin, older, *, incomplete):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(ActivationCache, "save", fail)
    kept(tmp_path, filled())
    assert os.strerror(error) in caplog.text
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_vanishes_while_it_is_read_is_a_warning(tmp_path, monkeypatch):
    kept(tmp_path, filled())
    monkeypatch.setattr(folder, "_looked_at", _looked_at_and_deleted)
    assert found_in(tmp_path) == {}


_looked_at = folder._looked_at


def _looked_at_and_deleted(path):
    found = _looked_at(path)
    path.unlink()
    return found


def write_forever(tmp_path, width, ready):
    keeper, cache = CacheFolder(tmp_path), make_cache(slot_bytes=2**20)
    keeper.load(cache, "train", LAYERS)
    ready.set()
    for turn in range(1_000_000):
        rows = IDS[turn % SAMPLES :][:1]
        cache.store(rows, (values(rows, 1, width),), boundary=1, fingerprint=turn)
        keeper.save(cache, "train", LAYERS)


@pytest.mark.distributed
def test_a_writer_that_is_killed_at_any_time_leaves_a_whole_file(tmp_path):
    spawned = multiprocessing.get_context("fork")
    draw = random.Random(1)
    for _ in range(10):
        ready = spawned.Event()
        writer = spawned.Process(target=write_forever, args=(tmp_path, 4096, ready))
        writer.start()
        assert ready.wait(60)
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        for file in cache_files(tmp_path):
            assert file.head is not None, file.problem
            assert damaged_records(file.path) == 0
    found_in(tmp_path)  # deletes what the killed ones left unfinished
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
