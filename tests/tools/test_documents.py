"""The documents lead where they say: links, files, names; lines fit a terminal."""

import ast
import re

import pytest

from tests.support.documents import PAGES, ROOT, name_of

IDS = [name_of(page) for page in PAGES]
WIDTH = 120
LINK = re.compile(r"(?<!`)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
WORK = re.compile(r"`([\w/]+\.(?:py|cpp|h))`(?:,? `([\w.:]+)`)")


def prose(text):
    """The lines that are neither code nor within it."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def anchors(text):
    """What a heading can be linked by."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def links(page):
    return [
        link
        for link in LINK.findall(prose(page.read_text()))
        if not re.match(r"https?:", link)
    ]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_lines_fit(page):
    lines = prose(page.read_text()).splitlines()
    long = [x for x in lines if len(x) > WIDTH and not x.startswith("|")]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_lists_are_lists_for_every_reader(page):
    """GitHub's Markdown and the site's: they differ where a list begins."""
    before = ""
    for line in prose(page.read_text()).splitlines():
        item = re.match(r"( *)(?:\*|\d+\.) ", line)
        if item:
            assert len(item[1]) in (0, 4), line
            goes_on = re.match(r" |\* |\d+\. |#", before)
            assert not before or goes_on, line
        assert not re.match(r" *(?:[-+]|\d+\)) ", line), line
        assert item or not re.match("    ", line) or before, line  # code without a kind
        before = line


def test_every_page_is_on_the_map():
    map_page = ROOT / "docs" / "index.md"
    found = {
        (map_page.parent / link.partition("#")[0]).resolve() for link in links(map_page)
    }
    assert [page for page in PAGES if page != map_page and page not in found] == []


def section(title):
    text = (ROOT / "docs" / "architecture.md").read_text()
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]


def file_of(path):
    return ROOT / path if path.startswith("csrc/") else ROOT / "pipetransformer" / path


def names_in(path):
    """What a file defines: `name` and `Class.name`, or in C++ what looks like it."""
    text = file_of(path).read_text()
    if not path.endswith(".py"):
        return set(re.findall(r"\b((?:\w+::)*~?\w+)(?=\()", text)) | set(
            re.findall(r"\b\w+::(\w+)(?=\()", text)
        )
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, kinds):
            found.add(node.name)
            inner = [x for x in node.body if isinstance(x, kinds)]
            found |= {f"{node.name}.{x.name}" for x in inner}
    return found


def test_the_walks_name_files_and_what_is_in_them():
    walks = section("Five walks through the code")
    steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", walks, re.M)
    assert len(steps) == 50
    for step in steps:
        named = WORK.findall(step.replace("\n  ", ""))
        assert named, step
        for path, name in named:
            assert name in names_in(path), f"{path} {name}"


def test_the_files_of_the_questions_exist():
    table = section("Where is ...?")
    assert table.count("\n|") > 12
    for path in re.findall(r"`([\w/]+\.(?:py|cpp|h))`", table):
        assert file_of(path).is_file(), path


def test_other_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|h|md))`", text):
        places = (ROOT / path, file_of(path))
        assert any(place.is_file() for place in places), path
