"""``report``: what it prints, whatever the locale. The page: tests/report."""

import io
import json

from pipetransformer.cli.main import main
from pipetransformer.planner import search
from tests.cli.model_files import files
from tests.explanation.test_run import a_summary
from tests.planner.instances import cluster, equal_profile

__all__ = ["files"]


def test_the_page_is_printed_as_it_is_written_in_every_locale(files, monkeypatch):
    files.write("summary.json", json.dumps(a_summary()))
    page = files.path("page.html")
    assert files.run("report", files.folder, "--output", page)[0] == 0
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", stream)
    assert main(["report", str(files.folder), "--output", "-"]) == 0
    printed = stream.buffer.getvalue().decode()
    assert "–" in printed
    with open(page, encoding="utf-8") as file:
        assert printed == file.read()


def test_a_file_of_another_kind_is_named(tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan = search(equal_profile(3), cluster(4), global_batch=8)
    path.write_text(plan.to_json())
    assert main(["report", str(path), "--output", str(tmp_path / "page.html")]) == 2
    told = capsys.readouterr().err
    assert told == f"error: {path}: expected a run's summary, got a plan\n"
