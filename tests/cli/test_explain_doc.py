"""docs/explain.md names the options of its commands and what these print."""

import re

import pytest

from pipetransformer.cli.main import make_parser
from tests.cli.model_files import files

__all__ = ["files"]


@pytest.fixture
def text(request):
    return (request.config.rootpath / "docs" / "explain.md").read_text()


@pytest.mark.parametrize("command", ["plan", "simulate", "explain"])
def test_usage_lines_name_every_option(text, command):
    usage = re.search(rf"```text\npipetransformer {command} (.*?)```", text, re.S)[1]
    parsers = make_parser()._subparsers._group_actions[0].choices
    for action in parsers[command]._actions:
        for option in action.option_strings:
            if option.startswith("--") and option != "--help":
                assert option in usage


def test_json_fields_are_named(text, files):
    path = files.plan()
    explained = files.json("explain", path, *files.model)
    simulated = files.json("simulate", "--plan", path, *files.model)
    for name in (*explained, *simulated):
        assert f"`{name}`" in text, name
    for way in explained["counterfactuals"]:
        assert f"`{way['name']}`" in text
