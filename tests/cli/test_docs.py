"""The formats of files in the documents: examples that parse, fields."""

from tests.planner.documents import FORMATS
from tests.support.documents import ROOT, blocks

PAGE = ROOT / "docs" / "formats.md"


def test_every_format_has_an_example_that_parses():
    examples = blocks(PAGE, "json")
    assert sorted(example.title for example in examples) == sorted(FORMATS)
    for example in examples:
        kind = FORMATS[example.title][0]
        read = kind.from_json(example.code)
        assert kind.from_json(read.to_json()) == read


def test_every_field_is_described():
    text = PAGE.read_text()
    for kind, _ in FORMATS.values():
        for field in kind.__dataclass_fields__:
            assert f"`{field}`" in text, field
