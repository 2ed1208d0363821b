"""Files of cached activations, from the command line."""

import json
import os

import pytest
import torch

from pipetransformer.autocache import ActivationCache, CacheFolder
from pipetransformer.cli import main


@pytest.fixture
def folder(tmp_path):
    """A folder with two files, and two things that are none of ours."""
    for space in ("train", "val"):
        cache = ActivationCache.create(
            run_id="run", num_samples=5, slot_bytes=4096, budget_bytes=2**20
        )
        keeper = CacheFolder(tmp_path)
        keeper.load(cache, space, 7)
        rows = torch.arange(4)
        cache.store(rows, (torch.randn(4, 8),), boundary=1, fingerprint=1)
        keeper.save(cache, space, 7)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder.activations").mkdir()
    return tmp_path


def run(capsys, *words):
    code = main.main(["cache", *map(str, words)])
    out, error = capsys.readouterr()
    return code, out, error


def listed(capsys, *words):
    code, out, _ = run(capsys, *words, "--json")
    return code, {file["file"]: file for file in json.loads(out)["files"]}


def test_ls_tells_sets_and_records(folder, capsys):
    code, files = listed(capsys, "ls", folder)
    assert code == 0 and len(files) == 3
    usable = [file for file in files.values() if not file["problem"]]
    assert sorted(file["space"] for file in usable) == ["train", "val"]
    for file in usable:
        assert (file["records"], file["samples"]) == (4, 5)
        assert file["file_bytes"] == os.stat(folder / file["file"]).st_size
    assert "a folder" in files["folder.activations"]["problem"]
    code, out, _ = run(capsys, "ls", folder)
    assert code == 0
    words = "".join(out.split())  # a line is as wide as the terminal
    assert "train-" in words and "expectedaregularfile" in words
    assert "notes" not in words


def test_verify_finds_what_is_damaged(folder, capsys):
    (folder / "folder.activations").rmdir()
    assert listed(capsys, "verify", folder)[0] == 0
    path = next(folder.glob("val-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, files = listed(capsys, "verify", folder)
    assert code == 1
    assert files[path.name]["problem"] == "1 records are damaged"


def test_rm_deletes_old_files_of_ours_and_nothing_else(folder, capsys):
    path = next(folder.glob("val-*"))
    os.utime(path, (0, 0))
    assert list(listed(capsys, "rm", folder, "--keep", 1)[1]) == [path.name]
    assert not path.exists()
    code, files = listed(capsys, "rm", folder)
    assert code == 0 and len(files) == 1
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["folder.activations", "notes.txt"]


@pytest.mark.parametrize("command", ["ls", "verify", "rm"])
def test_a_folder_that_is_not_there_is_bad_input(tmp_path, capsys, command):
    code, _, error = run(capsys, command, tmp_path / "nothing")
    assert code == 2
    assert error.startswith("error: ") and "nothing" in error
