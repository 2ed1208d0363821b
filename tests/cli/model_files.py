"""A profile, a cluster and a way to run commands on them, for the commands' tests."""

import json

import pytest

from pipetransformer.cli.main import main
from tests.explanation.cases import a_profile, cached_cluster


class Files:
    """Files of one small model in a folder, and commands on them."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self.profile = self.write("profile.json", a_profile(8, heavy=5).to_json())
        self.cluster = self.write("cluster.json", cached_cluster().to_json())
        self.model = ("--profile", self.profile, "--cluster", self.cluster)
        self._capsys = capsys

    def path(self, name):
        return str(self.folder / name)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return self.path(name)

    def run(self, *arguments):
        """Return exit code, standard output and standard error."""
        code = main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, *arguments, code=0):
        """Return what a command prints with --json."""
        found, out, err = self.run(*arguments, "--json")
        assert (found, err) == (code, "")
        return json.loads(out)

    def plan(self, *options):
        """Plan 16 rows a step and return the path of the plan's file."""
        path = self.path(f"plan{len(list(self.folder.iterdir()))}.json")
        arguments = ("plan", *self.model, "--global-batch", 16, "--output", path)
        self.json(*arguments, *options)
        return path


@pytest.fixture
def files(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return Files(tmp_path, capsys)
