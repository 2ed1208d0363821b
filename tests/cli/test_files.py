"""Reading and writing files: errors name the file, writing is all or nothing."""

import io
import json
import os
import stat
import sys
import types

import pytest

from pipetransformer.cli import files
from pipetransformer.planner import Cluster, search
from tests.planner.instances import cluster, equal_profile


def test_profile_cluster_and_plan_are_read_from_files(tmp_path):
    path = tmp_path / "file.json"
    for value, read in (
        (equal_profile(3), files.read_profile),
        (cluster(4), files.read_cluster),
    ):
        files.write_text(str(path), value.to_json())
        assert read(str(path)) == value


def kept(profile):
    """What a run keeps of its profile (`PlanConfig.profile`)."""
    fields = {"version": 8, "conditions": {}, "profile": json.loads(profile.to_json())}
    return json.dumps(fields)


def test_a_profile_is_taken_out_of_what_a_run_has_kept(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text(kept(equal_profile(3)))
    assert files.read_profile(str(path)) == equal_profile(3)
    with pytest.raises(
        ValueError, match="expected a cluster, got a profile that a run has kept$"
    ):
        files.read_cluster(str(path))
    path.write_text('{"version": 8, "conditions": {}, "profile": {"version": 3}}')
    with pytest.raises(ValueError, match="kept.json: profile version: expected 1, got"):
        files.read_profile(str(path))


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "file.json"
    kinds = {
        "profile": (equal_profile(3), files.read_profile),
        "cluster": (cluster(4), files.read_cluster),
        "plan": (search(equal_profile(3), cluster(4), global_batch=8), files.read_plan),
    }
    for got, (value, _) in kinds.items():
        path.write_text(value.to_json())
        for wanted, (_, read) in kinds.items():
            if wanted != got:
                text = f"{path}: expected a {wanted}, got a {got}$"
                with pytest.raises(ValueError, match=text):
                    read(str(path))


def test_standard_input_is_a_file_called_dash(monkeypatch):
    def feed(data):
        stdin = types.SimpleNamespace(buffer=io.BytesIO(data))
        monkeypatch.setattr(sys, "stdin", stdin)

    feed(cluster(4).to_json().encode())
    assert files.read_cluster("-") == cluster(4)
    feed(b"{}")
    with pytest.raises(ValueError, match="standard input: cluster version: expected 1"):
        files.read_cluster("-")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "cluster: expected JSON, got text with Expecting value"),
        (b"\xff\xfe{}", "text: expected UTF-8, got byte 0xff at 0"),
        (b'{"a": "\xe9"}', "text: expected UTF-8, got byte 0xe9 at 7"),
        (b"\xef\xbb\xbf{}", "cluster: expected JSON, got text with .*BOM"),
        (b"{} {}", "cluster: expected JSON, got text with Extra data"),
        (b'{"version": 1, "version": 1}', "cluster: .* the key 'version' twice"),
    ],
)
def test_unreadable_text_is_refused_with_the_files_name(tmp_path, data, text):
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"bad.json: {text}"):
        files.read_cluster(str(path))


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 100)
    assert len(files.read_text(str(path), most_bytes=100)) == 100
    with pytest.raises(ValueError, match="large: size: expected at most 99 bytes"):
        files.read_text(str(path), most_bytes=99)
    with pytest.raises(ValueError, match="/dev/zero: size: expected at most 1000"):
        files.read_text("/dev/zero", most_bytes=1000)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.json"):
        files.read_profile(str(tmp_path / "nothing.json"))
    with pytest.raises(IsADirectoryError):
        files.read_profile(str(tmp_path))


def test_written_files_are_whole_and_their_owners_alone(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("before")
    files.write_text(str(path), "after")
    assert path.read_text() == "after\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(str(path), "later")
    assert path.read_text() == "after\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_names_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("first", "second"):
        files.write_text(str(link), text)
        assert link.is_symlink() and target.read_text() == f"{text}\n"
    assert sorted(tmp_path.rglob("*")) == sorted([target.parent, target, link])


def test_what_is_no_regular_file_is_written_to_not_replaced(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_text(str(path), "text")
        assert os.read(reader, 100) == b"text\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    files.write_text(str(null), "text")
    assert null.is_symlink() and stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_what_cannot_be_written_is_named_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, error in (("no/out.json", FileNotFoundError), (".", IsADirectoryError)):
        with pytest.raises(error) as caught:
            files.write_text(path, "text")
        assert caught.value.filename == path
    with pytest.raises(ValueError, match="file to write: expected a name, got ''"):
        files.write_text("", "text")
    assert list(tmp_path.iterdir()) == []
    files.write_text("n" * 255, "as long as a name may be")


def test_closed_standard_input_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input: expected an open one"):
        files.read_text("-")


def test_a_dash_is_standard_output(capsys):
    files.write_text("-", "text")
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_standard_output_of_data_is_utf_8_in_every_locale(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    files.write_text("-", "日本 –")
    assert stream.buffer.getvalue() == "日本 –\n".encode()


def test_a_stream_of_text_alone_takes_data(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    files.write_text("-", "日本")
    assert sys.stdout.getvalue() == "日本\n"


@pytest.mark.parametrize("name", ["cpu-4-slots", "gpu-2x8"])
def test_the_example_clusters_load(request, name):
    path = request.config.rootpath / "examples" / "clusters" / f"{name}.json"
    read = files.read_cluster(str(path))
    assert isinstance(read, Cluster) and read.cache is not None
    # Every field is written out, so that the file shows them all.
    given = json.loads(path.read_text())
    assert set(json.loads(read.to_json())) - set(given) <= {"context_bytes"}
