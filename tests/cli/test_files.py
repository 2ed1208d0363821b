"""Reading and writing files: errors name the file, writing is all or nothing."""

import io
import json
import os
import stat
import sys
import types

import pytest

from pipetransformer.cli import files
from pipetransformer.planner import Cluster
from tests.planner.instances import cluster, equal_profile


def test_profile_cluster_and_plan_are_read_from_files(tmp_path):
    path = tmp_path / "file.json"
    for value, read in (
        (equal_profile(3), files.read_profile),
        (cluster(4), files.read_cluster),
    ):
        files.write_text(str(path), value.to_json())
        assert read(str(path)) == value


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


def test_a_dash_is_standard_output(capsys):
    files.write_text("-", "text")
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize("name", ["cpu-4-slots", "gpu-2x8"])
def test_the_example_clusters_load(request, name):
    path = request.config.rootpath / "examples" / "clusters" / f"{name}.json"
    read = files.read_cluster(str(path))
    assert isinstance(read, Cluster) and read.cache is not None
    # Every field is written out, so that the file shows them all.
    given = json.loads(path.read_text())
    assert set(json.loads(read.to_json())) - set(given) <= {"context_bytes"}
