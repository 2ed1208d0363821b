"""The documents' examples: formats that parse, commands and options that exist."""

import re
import shlex

import pytest

from pipetransformer.cli.main import make_parser
from tests.planner.documents import FORMATS


@pytest.fixture
def docs(request):
    return request.config.rootpath / "docs"


def test_every_format_has_an_example_that_parses(docs):
    text = (docs / "formats.md").read_text()
    blocks = re.findall(r"```json (\w+)\n(.*?)```", text, re.DOTALL)
    assert sorted(name for name, _ in blocks) == sorted(FORMATS)
    for name, block in blocks:
        kind = FORMATS[name][0]
        read = kind.from_json(block)
        assert kind.from_json(read.to_json()) == read


def test_every_field_is_described(docs):
    text = (docs / "formats.md").read_text()
    for kind, _ in FORMATS.values():
        for field in kind.__dataclass_fields__:
            assert f"`{field}`" in text, field


@pytest.mark.parametrize("page", ["cli.md", "../README.md"])
def test_the_commands_of_the_documents_parse(docs, page):
    lines = (docs / page).read_text().splitlines()
    known = make_parser()._subparsers._group_actions[0].choices
    seen = set()
    for line in lines:
        words = re.sub(r"^(\$ )?(\w+=\S+ )*", "", line)
        if not words.startswith("pipetransformer ") or "[--" in words:
            continue
        arguments = shlex.split(words)[1:]
        if arguments[0] in known:
            assert make_parser().parse_args(arguments).run
            seen.add(arguments[0])
    assert "profile" in seen
