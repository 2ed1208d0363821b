"""The site of the documents: all are on it, links hold there, names have docstrings."""

import importlib
import inspect
import posixpath
import re

import pytest

import docs_site
import pipetransformer as pt
from tests.support.documents import PAGES, ROOT, name_of

API = sorted((ROOT / "docs" / "api").glob("*.md"))


def shown(page):
    """The names whose docstrings a page shows."""
    return re.findall(r"^::: (\S+)$", page.read_text(), re.M)


def resolved(name):
    """What a dotted name stands for, be it a module or in one."""
    module, _, rest = name.rpartition(".")
    return getattr(importlib.import_module(module), rest)


def is_described(name):
    """Whether it has a docstring; a class of the extension: where it gets its name."""
    if inspect.getdoc(resolved(name)):
        return True
    named = re.compile(rf'^{name.rpartition(".")[2]} = _C\..*\n"""', re.M)
    sources = (ROOT / "pipetransformer").rglob("*.py")
    return any(named.search(path.read_text()) for path in sources)


def test_the_navigation_names_each_document_once():
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text, re.M)
    assert len(named) == len(set(named))
    assert {docs_site.place(name_of(page)) for page in PAGES} == set(named)


def test_what_is_on_the_site_is_known_by_its_source():
    assert docs_site.place("docs/results/cache.md") == "results/cache.md"
    assert docs_site.place("README.md") == "repository/README.md"
    assert docs_site.place("csrc/a.cpp") == "repository/csrc/a.cpp.md"
    came_along = docs_site.outside([name_of(page) for page in PAGES])
    assert "benchmarks/kills_and_resumes.py" in came_along
    for source in [*came_along, "docs/guide.md"]:
        assert docs_site.source_of(docs_site.place(source)) == source


@pytest.mark.parametrize(
    ("source", "link", "there"),
    [
        ("docs/guide.md", "../README.md#quickstart", "repository/README.md#quickstart"),
        ("docs/guide.md", "cache.md", "cache.md"),
        ("docs/guide.md", "#steps", "#steps"),
        ("docs/guide.md", "https://ui.perfetto.dev", "https://ui.perfetto.dev"),
        ("docs/results/cache.md", "../index.md", "../index.md"),
        ("README.md", "docs/img/run.svg", "../img/run.svg"),
        ("benchmarks/METRICS.md", "../docs/recipe.md", "../../recipe.md"),
    ],
)
def test_links_lead_where_their_targets_are_on_the_site(source, link, there):
    assert docs_site.relinked(f"a [b]({link})", source) == f"a [b]({there})"


def test_code_keeps_what_looks_like_a_link():
    text = "`a[0](x.md)`\n\n```python\na[0](x.md)\n```\n"
    assert docs_site.relinked(text, "README.md") == text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_link_of_a_page_leads_to_a_page_or_file_of_the_site(page):
    source = name_of(page)
    there = {docs_site.place(found) for found in docs_site.outside([source])}
    text = docs_site.relinked(page.read_text(), source)
    for part in docs_site.CODE.split(text)[::2]:
        for link in docs_site.LINK.finditer(part):
            here = posixpath.dirname(docs_site.place(source))
            target = posixpath.normpath(posixpath.join(here, link[2]))
            assert target in there or (ROOT / "docs" / target).is_file(), link[0]


def test_a_link_to_what_is_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[b](../b.md)")
    with pytest.raises(FileNotFoundError, match=r"b\.md: expected a file"):
        docs_site.outside(["docs/a.md"])


@pytest.mark.parametrize("page", API, ids=name_of)
def test_what_the_api_shows_has_a_docstring(page):
    for name in shown(page):
        assert is_described(name), name
        # Where a module has the name as well, the site would show that one.
        path = ROOT / name.replace(".", "/")
        is_module = path.is_dir() or path.with_suffix(".py").is_file()
        assert is_module == inspect.ismodule(resolved(name)), name


def test_the_api_shows_all_public_names():
    found = [resolved(name) for page in API for name in shown(page)]
    public = {name: getattr(pt, name) for name in pt.__all__}
    for name, value in public.items():
        assert inspect.ismodule(value) or value in found, name
